"""``python -m benchmarks.gpu.questions.asked NAME [ARGUMENT]`` asks one question and prints the answer as a
line of JSON. Each in a process of its own, because some of them hurt: a handle that is none, memory that is
gone. The card's settings stay as they are, and nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Final

from benchmarks.gpu.questions import copies, handles, locking, machine, threads, with_torch
from benchmarks.gpu.questions.asking import Answer

#: In the order in which they are asked: what is cold first, what hurts last.
QUESTIONS: Final[tuple[Callable[..., Answer], ...]] = (
    machine.imports, machine.context, machine.kernels, machine.nvml, machine.host_memory,
    copies.page_locks, locking.locking, copies.calls, copies.allocations, copies.bandwidth,
    threads.waits, threads.full_queue, threads.lock, handles.own_handle, handles.handles,
    handles.bad_handle, threads.captures, with_torch.torch_facts, with_torch.torch_loop,
)  # fmt: skip


def main(name: str, *arguments: str) -> None:
    """Ask, and print."""
    ask = {one.__name__: one for one in QUESTIONS}[name]
    print(json.dumps(ask(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
