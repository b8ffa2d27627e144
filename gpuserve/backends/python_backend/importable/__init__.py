"""Folder on the import path of workers that run Triton's Python models: modules with names of another
project.
"""
