"""All that a worker does with its one GPU. Imported only by a worker that has one; CUDA itself is reached
through cupy, by ``runtime.py`` alone.

::

    front's arena (page-locked) --h2d stream--> device buffers -> the callable, on the default stream
    output arena (page-locked) <--d2h stream--  what it returned

Nothing here receives or sends a message, and no callable is called.
"""
