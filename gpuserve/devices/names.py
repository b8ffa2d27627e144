"""How a device is written: in a config file, as ``--device``, in ``bind()``. Text only: what a machine has is
not known here.

=======================  ==========================================================================
``cpu``                  no GPU
``cuda:0``, ``cuda:1``…  a GPU by its number: in the order of the PCI bus, or where
                         ``CUDA_VISIBLE_DEVICES`` is set, in that of its list; a GPU in MIG mode
                         counts as its instances
``cuda:*``               every one of them
``GPU-…``                a GPU by its UUID, or the beginning of it
``MIG-…``                a MIG instance by its UUID, or the beginning of it
=======================  ==========================================================================
"""

from __future__ import annotations

import re
from typing import Final

CPU: Final = "cpu"
EVERY_GPU: Final = "cuda:*"
#: The environment variables by which CUDA chooses and numbers the GPUs of a process.
VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
#: What a worker process calls its GPU, which is the only one that it sees.
OWN_GPU: Final = "cuda:0"
_NUMBERED = re.compile(r"cuda:(0|[1-9]\d{0,3})")
_ALIKE = re.compile(r"(?:cuda|gpu|nvidia)[:\s_-]*(\d{1,4}|\*|all|)")
#: Before driver 470 a MIG instance was called MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
_UUID = re.compile(r"(?:GPU-[0-9a-fA-F]|MIG-[0-9a-fA-FG])[0-9a-zA-Z/-]*")


def check_device_name(text: str) -> str:
    if text in (CPU, EVERY_GPU) or number_of(text) is not None or is_uuid(text):
        return text
    raise ValueError(
        "expected 'cpu', 'cuda:0', 'cuda:1', …, 'cuda:*' for every GPU, or a UUID (GPU-… or MIG-…), "
        f"given {text!r}"
    )


def meant(text: str) -> str | None:
    """Return the name that somebody means who writes it in another way: ``gpu0``, ``CUDA:1``, ``gpu:*``."""
    word = text.strip().casefold()
    found = _ALIKE.fullmatch(word)
    if found is not None:
        return EVERY_GPU if found[1] in ("*", "all") else gpu_name(int(found[1] or 0))
    return CPU if word == CPU else None


def gpu_name(number: int) -> str:
    return f"cuda:{number}"


def number_of(text: str) -> int | None:
    found = _NUMBERED.fullmatch(text)
    return None if found is None else int(found[1])


def is_uuid(text: str) -> bool:
    """Whether the text is a UUID of a GPU or of a MIG instance, or the beginning of one."""
    return _UUID.fullmatch(text) is not None
