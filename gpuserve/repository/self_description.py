"""What models say of themselves where their config.pbtxt leaves it out: inputs, outputs, their largest batch.
They are asked in processes of their own (``gpuserve/describe``), and asked again only when their files have
changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuserve.config.messages import Problem
from gpuserve.repository.draft import Remark
from gpuserve.repository.folders import revision
from gpuserve.repository.sources import problem_at
from gpuserve.repository.translation import Translation
from gpuserve.runtimes.table import source_of

if TYPE_CHECKING:
    from gpuserve.describe.asking import Answer


class SelfDescriptions:
    """The answers of models, by what they were asked and by their files at that time."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, ...], Answer] = {}

    def completed(
        self, translations: Sequence[Translation]
    ) -> tuple[list[Translation], dict[str, list[Problem]]]:
        """The models with what they say of themselves, and the problems of those that do not say it."""
        self._ask([one for one in translations if one.asks])
        found: list[Translation] = []
        broken: dict[str, list[Problem]] = {}
        for one in translations:
            answer = self._answers[_key(one)] if one.asks else None
            if answer is None:
                found.append(one)
            elif text := answer.problem or _lacks(one, answer.declared):
                broken[one.folder.name] = [problem_at(one.folder, one.draft, Remark((), text))]
            else:
                entries = tuple(_under(entry, answer.declared) for entry in one.entries)
                found.append(dataclasses.replace(one, entries=entries))
        return found, broken

    def _ask(self, translations: Sequence[Translation]) -> None:
        new = {key: one for one in translations if (key := _key(one)) not in self._answers}
        if not new:
            return
        from gpuserve.describe.asking import Question, ask  # most repositories have nothing to ask

        questions = []
        for entry in (one.entries[-1] for one in new.values()):
            path, kwargs = source_of(entry["callable"], entry["kwargs"], ".")
            decoupled = True if entry.get("decoupled") else None
            questions.append(Question(path, ".", kwargs, decoupled, entry.get("python", "")))
        self._answers.update(zip(new, ask(questions), strict=True))


def _key(one: Translation) -> tuple[str, ...]:
    entry = one.entries[-1]
    return entry["callable"], json.dumps(entry["kwargs"], sort_keys=True), revision(one.folder.path)


def _lacks(one: Translation, said: Mapping[str, Any]) -> str:
    """What is not known of a model after it was asked; "" where nothing is."""
    for key, field in (("inputs", "input"), ("outputs", "output")):
        if key not in said and key not in one.draft.entry:
            return (
                f"its {key} are not known, for the model does not say them: write {field} in its config.pbtxt"
            )
    return ""


def _under(given: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, and below it what the model says, key by key."""
    found = dict(said) | dict(given)
    for key, value in said.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
            found[key] = _under(given[key], value)
    return found
