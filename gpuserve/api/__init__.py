"""The Python API: ``Server`` and ``AttachedServer``, and the conversion of callables to models."""
