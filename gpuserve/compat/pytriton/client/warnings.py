"""PyTriton's warnings, for programs that filter them. gpuserve's clients never warn."""

from __future__ import annotations


class PyTritonWarning(UserWarning):
    """The base class of PyTriton's warnings."""


class NotSupportedTimeoutWarning(PyTritonWarning):
    """A timeout that a client ignores. gpuserve's clients ignore none."""
