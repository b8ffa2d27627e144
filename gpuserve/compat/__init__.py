"""Other projects' names for what gpuserve does. Maps only: nothing of a server is decided here."""

from __future__ import annotations


def install() -> None:
    """Let ``import pytriton`` find gpuserve from now on, here and in processes that are started from here:
    what ``gpuserve run`` does for a program, for the first cell of a notebook.

    Raises:
        ImportError: another pytriton was imported before.
    """
    from gpuserve.compat.pytriton import alias

    alias.install()
