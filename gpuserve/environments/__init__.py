"""Other Python environments than the server's own: a worker runs in the interpreter of one, with what of
ours it needs put on its path. Nothing of models is known here.
"""
