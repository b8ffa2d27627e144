"""Compatibility with Triton and PyTriton: their names, options and errors mapped to those of gpuserve."""

from __future__ import annotations


def install() -> None:
    """Make ``import pytriton`` import gpuserve from now on, here and in processes that are started from here.

    ``gpuserve run`` does the same for a program. The function is for the first cell of a notebook.

    Raises:
        ImportError: if another pytriton was imported before.
    """
    from gpuserve.compat.pytriton import alias

    alias.install()
