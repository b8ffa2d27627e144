"""Model files that are served without code: an ordinary class callable for each kind of file, one a module,
and ``table.py``, which says by the look of a file or a folder which class that is. A class takes the file and
the options of its library, and ``declare`` reads the tensors from the file. Nothing here is imported by a
server itself: the classes run in workers, and in the processes that describe callables.
"""
