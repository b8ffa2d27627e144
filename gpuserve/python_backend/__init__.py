"""Triton's ``backend: "python"``: what a ``model.py`` imports, and the callable that runs it in a worker.
Nothing of config.pbtxt or of folders of models is in here.
"""
