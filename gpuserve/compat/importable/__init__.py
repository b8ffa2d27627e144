"""Folder on the import path of programs that ``gpuserve run`` starts; see ``pytriton/alias.py``."""
