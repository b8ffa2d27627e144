"""Folder on the import path of workers that run ``model.py``: modules with names of another project."""
