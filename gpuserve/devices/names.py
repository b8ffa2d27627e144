"""Device names in config files, in ``--device`` and in ``bind()``. This module does not look at the machine.

=======================  ==========================================================================
``cpu``                  no GPU
``cuda:0``, ``cuda:1``…  a GPU by its number: in the order of the PCI bus, or of the list in
                         ``CUDA_VISIBLE_DEVICES`` if it is set; a GPU in MIG mode counts as its
                         instances
``cuda:*``               every GPU
``auto``                 for each process the GPU with the most free memory; the CPU without any GPU
``GPU-…``                a GPU by its UUID, or a prefix of it
``MIG-…``                a MIG instance by its UUID, or a prefix of it
``cuda:0+cuda:1``        several GPUs for one process, which sees them in this order
=======================  ==========================================================================
"""

from __future__ import annotations

import re
from typing import Final

CPU: Final = "cpu"
EVERY_GPU: Final = "cuda:*"
#: The device that has the most free memory when the model is placed.
AUTO: Final = "auto"
#: Values of settings that switch a thing on or off, such as ``mps``.
ON: Final = "on"
OFF: Final = "off"
#: Between the names of the GPUs of one process.
TOGETHER: Final = "+"
#: The environment variables that select and number the GPUs of a process.
VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
_NUMBERED = re.compile(r"cuda:(0|[1-9]\d{0,3})")
_ALIKE = re.compile(r"(?:cuda|gpu|nvidia)[:\s_-]*(\d{1,4}|\*|all|)")
#: Before driver 470 a MIG instance was called MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
_UUID = re.compile(r"(?:GPU-[0-9a-fA-F]|MIG-[0-9a-fA-FG])[0-9a-zA-Z/-]*")


def check_device_name(text: str) -> str:
    names = devices_of(text)
    if text in (CPU, EVERY_GPU, AUTO) or all(number_of(one) is not None or is_uuid(one) for one in names):
        if len(set(names)) < len(names):
            raise ValueError(f"expected different GPUs for one process, given {text!r}")
        return text
    known = "'cpu', 'auto', 'cuda:0', 'cuda:1', …, 'cuda:*' for every GPU, or a UUID (GPU-… or MIG-…)"
    several = ", or several GPUs for one process, 'cuda:0+cuda:1'" if len(names) > 1 else ""
    raise ValueError(f"expected {known}{several}, given {text!r}")


def devices_of(name: str) -> list[str]:
    """Return the device of a process, or its GPUs in order."""
    return name.split(TOGETHER)


def likely_device_name(text: str) -> str | None:
    """Return the device name that was probably meant by ``gpu0``, ``CUDA:1``, ``gpu:*`` and the like."""
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
    """Return whether a text is a UUID of a GPU or of a MIG instance, or a prefix of one."""
    return _UUID.fullmatch(text) is not None
