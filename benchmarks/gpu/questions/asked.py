"""``python -m benchmarks.gpu.questions.asked NAME [ARGUMENT]`` asks one question and prints the answer as a
line of JSON. Each in a process of its own, because some of them hurt: memory that is gone. The card's
settings stay as they are, and nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Final

from benchmarks.command_line import exit_on_sigterm
from benchmarks.gpu.questions import asking, frameworks, memory, sharing, threads
from benchmarks.gpu.questions.asking import Answer

#: In the order in which they are asked: what is cold first, what hurts last.
QUESTIONS: Final[tuple[Callable[..., Answer], ...]] = (
    asking.imports, asking.context, asking.kernels, asking.nvml, asking.host_memory,
    memory.page_locks, memory.locking, memory.calls, memory.allocations, memory.bandwidth,
    threads.waits, threads.full_queue, threads.lock, memory.handles,
    threads.captures, threads.torch_facts, threads.torch_loop,
)  # fmt: skip
#: About processes that share the GPU, and the host's memory.
SHARING: Final[tuple[Callable[..., Answer], ...]] = (
    sharing.host_pointers, sharing.two_processes, sharing.small_instances, sharing.shared_memory,
    sharing.bad_host_pointer,
)  # fmt: skip
FRAMEWORKS: Final[tuple[Callable[..., Answer], ...]] = (
    frameworks.strided, frameworks.graphs, frameworks.onnx, frameworks.compiled,
)  # fmt: skip


def main(name: str, *arguments: str) -> None:
    exit_on_sigterm()
    ask = {one.__name__: one for one in (*QUESTIONS, *SHARING, *FRAMEWORKS)}[name]
    print(json.dumps(ask(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
