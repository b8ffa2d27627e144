"""PyTriton's warnings, for programs that filter them. gpuserve's clients have no reason to warn."""

from __future__ import annotations


class PyTritonWarning(UserWarning):
    """The base class of PyTriton's warnings."""


class NotSupportedTimeoutWarning(PyTritonWarning):
    """A timeout that a client would not keep; gpuserve's keep all of theirs."""
