"""The GPU support of a worker, imported only by workers with a GPU. ``device/runtime.py`` alone imports
cupy.
"""
