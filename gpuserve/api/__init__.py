"""The Python API: ``Server`` and ``AttachedServer``, and how callables of a program become models."""
