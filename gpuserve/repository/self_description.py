"""What models say of themselves where their config.pbtxt leaves it out: inputs, outputs, their largest batch.
They are asked in processes of their own (``gpuserve/describe``), and asked again only when their files have
changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuserve.config.messages import Problem
from gpuserve.repository.draft import Remark
from gpuserve.repository.folders import revision
from gpuserve.repository.sources import problem_at
from gpuserve.repository.translation import Translation
from gpuserve.runtimes.table import source_of

if TYPE_CHECKING:
    from gpuserve.describe.asking import Answer, Question


class _Said(NamedTuple):
    """What a model answered, and what it was asked: its callable, the arguments, the state of its files."""

    asked: tuple[str, ...]
    answer: Answer


class SelfDescriptions:
    """What each model said last, and what it was asked then."""

    def __init__(self) -> None:
        self._known: dict[str, _Said] = {}

    def completed(
        self, translations: Sequence[Translation]
    ) -> tuple[list[Translation], dict[str, list[Problem]]]:
        """The models with what they say of themselves, and the problems of those that do not say it."""
        answers = self._answers([one for one in translations if one.asks])
        found: list[Translation] = []
        broken: dict[str, list[Problem]] = {}
        for one in translations:
            answer = answers.get(one.folder.name)
            if answer is None:
                found.append(one)
            elif text := answer.problem or _lacks(one, answer.declared):
                broken[one.folder.name] = [problem_at(one.folder, one.draft, Remark((), text))]
            else:
                entries = tuple(_under(entry, answer.declared) for entry in one.entries)
                found.append(dataclasses.replace(one, entries=entries))
        return found, broken

    def _answers(self, translations: Sequence[Translation]) -> dict[str, Answer]:
        """The answers of models, of which those are asked that were not asked the same before."""
        asked = {one.folder.name: _asked(one) for one in translations}
        known = {name: self._known.get(name) for name in asked}
        found = {name: said.answer for name, said in known.items() if said and said.asked == asked[name]}
        new = [one for one in translations if one.folder.name not in found]
        if new:
            from gpuserve.describe.asking import ask  # most repositories have nothing to ask

            for one, answer in zip(new, ask(map(_question, new)), strict=True):
                name = one.folder.name
                found[name] = answer
                if answer.problem is None:  # what it failed by may be gone the next time
                    self._known[name] = _Said(asked[name], answer)
        return found


def _asked(one: Translation) -> tuple[str, ...]:
    entry = one.entries[-1]
    return entry["callable"], json.dumps(entry["kwargs"], sort_keys=True), revision(one.folder.path)


def _question(one: Translation) -> Question:
    from gpuserve.describe.asking import Question  # as above

    entry = one.entries[-1]
    path, kwargs = source_of(entry["callable"], entry["kwargs"], ".")
    decoupled = True if entry.get("decoupled") else None
    return Question(path, ".", kwargs, decoupled, entry.get("python", ""))


def _lacks(one: Translation, said: Mapping[str, Any]) -> str:
    """What is not known of a model after it was asked; "" for nothing. There are models without inputs."""
    if said.get("outputs") or "outputs" in one.draft.entry:
        return ""
    return "its outputs are not known, for the model does not say them: write output in its config.pbtxt"


def _under(given: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, and below it what the model says, key by key."""
    found = dict(said) | dict(given)
    for key, value in said.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
            found[key] = _under(given[key], value)
    return found
