"""Projects to begin with (``gpuserve new``): the files of each kind are in ``templates``, and what a kind is,
and how they are written, in ``making.py``. Nothing is served or imported here.
"""
