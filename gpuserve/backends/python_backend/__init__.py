"""Triton's ``backend: "python"``: the module that a ``model.py`` imports, and the callable that runs it in a
worker. config.pbtxt and model repositories are read elsewhere.
"""
