"""The stand-in for ``cuda.bindings``: calls return their status first, and raise nothing."""
