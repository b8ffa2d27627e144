"""Weights that exist once for all instances of a server."""

from gpuserve_worker.memory.shared_weights import shared_weights

__all__ = ["shared_weights"]
