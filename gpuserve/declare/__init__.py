"""What a model is: what users write of it, and ``ModelSpec``, to which all of that comes. No process is
started.
"""
