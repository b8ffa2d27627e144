"""Requests that are like others before: what they have in common is said once, and all of one turn of the
loop are one message.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.requests.inference import InferRequest

#: As many shapes of requests are remembered; then all are forgotten: they are as many as clients like.
_MOST_TEMPLATES: Final = 1024
#: So much of requests is told of in one message.
_TOGETHER_NBYTES: Final = 64 << 10


class AlikeRequests:
    """Tells the front of requests by templates, which it makes."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._templates: dict[Any, int] = {}
        self._numbers = itertools.count(1)
        self._unsaid: list[tuple[Any, ...]] = []
        self._nbytes = 0

    def add(self, ticket: int, request: InferRequest, data: Sequence[Any]) -> None:
        """Have a request said with others, of whose inputs this is the data."""
        described = tuple([(one.name, one.datatype, one.shape) for one in request.inputs])
        key = request.model_name, request.model_version, request.outputs, described
        template = self._templates.get(key) or self._introduce(key)
        if not self._unsaid:
            self._passage.call_at_end(self.say)
        self._unsaid.append((ticket, template, request.timeout_s, *data))
        self._nbytes += len(data[0]) if len(data) == 1 else sum([len(one) for one in data])
        if self._nbytes > _TOGETHER_NBYTES:
            self.say()

    def say(self) -> None:
        """Say at once what was added: what comes after refers to it."""
        if self._unsaid:
            unsaid, self._unsaid, self._nbytes = self._unsaid, [], 0
            self._passage.post(messages.Alike(tuple(unsaid)))

    def forget_all(self) -> None:
        """Begin anew: another front knows no template, and nothing of what was not said."""
        self._templates.clear()
        self._unsaid, self._nbytes = [], 0

    def _introduce(self, key: Any) -> int:
        self.say()
        if len(self._templates) >= _MOST_TEMPLATES:
            self._passage.post(messages.ForgetTemplates())
            self._templates.clear()
        template = self._templates[key] = next(self._numbers)
        self._passage.post(messages.RequestTemplate(template, *key))
        return template
