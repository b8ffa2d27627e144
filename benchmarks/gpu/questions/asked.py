"""``python -m benchmarks.gpu.questions.asked NAME [ARGUMENT]`` asks one question and prints the answer as a
line of JSON. Each in a process of its own, because some of them hurt: a handle that is none, memory that is
gone. The card's settings stay as they are, and nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Final

from benchmarks.gpu.questions import asking, memory, threads
from benchmarks.gpu.questions.asking import Answer

#: In the order in which they are asked: what is cold first, what hurts last.
QUESTIONS: Final[tuple[Callable[..., Answer], ...]] = (
    asking.imports, asking.context, asking.kernels, asking.nvml, asking.host_memory,
    memory.page_locks, memory.locking, memory.calls, memory.allocations, memory.bandwidth,
    threads.waits, threads.full_queue, threads.lock, memory.own_handle, memory.handles,
    memory.bad_handle, threads.captures, threads.torch_facts, threads.torch_loop,
)  # fmt: skip


def main(name: str, *arguments: str) -> None:
    ask = {one.__name__: one for one in QUESTIONS}[name]
    print(json.dumps(ask(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
