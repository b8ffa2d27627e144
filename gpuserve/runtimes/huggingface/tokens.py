"""Prompts that become tokens: once for all answers of a request, and beside the event loop where they are
long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

#: A shorter prompt takes less than a few milliseconds.
SHORT_CHARACTERS: Final = 16 << 10

Tokens: TypeAlias = Sequence[int]


class SharedTokens:
    """The tokens of the prompts of requests. The answers of one request ask for them in one turn of the loop,
    and share them.
    """

    def __init__(self) -> None:
        #: By the identity of a prompt: the prompt itself, which keeps its identity, and its tokens.
        self._shared: dict[int, tuple[object, asyncio.Future[Tokens]]] = {}
        #: One thread: tokenizers may not be called by several at once.
        self._executor = ThreadPoolExecutor(1, "tokens")

    async def of(self, prompt: Any, n_characters: int, make: Callable[[], Tokens]) -> Tokens:
        """Return what ``make`` makes of a prompt of so many characters; raises what it raises."""
        key = id(prompt)
        if key not in self._shared:
            loop = asyncio.get_running_loop()
            if n_characters > SHORT_CHARACTERS:
                future: asyncio.Future[Tokens] = loop.run_in_executor(self._executor, make)
            else:
                future = loop.create_future()
                try:
                    future.set_result(make())
                except Exception as error:  # a template is a program of its folder
                    future.set_exception(error)
            self._shared[key] = prompt, future
            future.add_done_callback(lambda done: self._forget(key, done))
        # One answer that is given up is not the others'.
        return await asyncio.shield(self._shared[key][1])

    def _forget(self, key: int, done: asyncio.Future[Tokens]) -> None:
        del self._shared[key]
        done.exception()  # which is raised to whoever still waits
