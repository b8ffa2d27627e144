"""All that a worker does with its one GPU. Imported only by a worker that has one; CUDA itself is reached
through cupy, by ``device/runtime.py`` alone.
"""
