"""What an entry of a model leaves out and its callable says of itself: values under those of the file, key by
key. Who says all of its tensors is not asked. What a callable says comes from ``gpuserve/describe``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuserve.config.messages import ConfigProblems, Origin, Problem
from gpuserve.config.models import callable_of
from gpuserve.config.positions import Path
from gpuserve.config.precedence import Override
from gpuserve.declare.rules import mapping

if TYPE_CHECKING:
    from gpuserve.config.entries.model import ModelEntry
    from gpuserve.config.sources import Sources
    from gpuserve.describe.asking import Answer, Question

_TENSORS: Final = {"inputs": "--input", "outputs": "--output"}
TENSOR_FORM: Final = "name:dtype:shape, such as x:float32:-1 or image:uint8:224,224,3"


def undescribed(models: Sequence[ModelEntry]) -> list[int]:
    """The positions of the models that leave tensors to their callables."""
    return [index for index, one in enumerate(models) if _leaves_tensors(one)]


def _leaves_tensors(entry: ModelEntry) -> bool:
    return entry.callable is not None and not entry.given.issuperset(_TENSORS)


class Said(NamedTuple):
    """What the callable of a model said when it was asked."""

    model: str
    question: Question
    answer: Answer


def ask_models(
    models: Sequence[ModelEntry], indices: Sequence[int], base_dir: str, known: Iterable[Said]
) -> list[Said]:
    """What the callables of these models say; those that are ``known`` to have been asked the same are not
    asked again, unless they had no answer.
    """
    from gpuserve.describe.asking import ask  # most configurations have nothing to ask

    answers = [(one.question, one.answer) for one in known if one.answer.problem is None]
    questions = [_question(models[index], base_dir) for index in indices]
    found = [next((answer for same, answer in answers if same == one), None) for one in questions]
    new = iter(ask(one for one, answer in zip(questions, found, strict=True) if answer is None))
    return [
        Said(models[index].name, question, answer or next(new))
        for index, question, answer in zip(indices, questions, found, strict=True)
    ]


def with_stale(
    models: Sequence[ModelEntry],
    indices: Sequence[int],
    said: Sequence[Said],
    stale: Iterable[Said],
    sources: Sources,
) -> tuple[list[Said], dict[str, ConfigProblems]]:
    """What callables say, with an earlier answer to the same question in place of a problem; and by model
    each problem that this was done for.
    """
    earlier = [one for one in stale if one.answer.problem is None]
    found: list[Said] = []
    broken: dict[str, ConfigProblems] = {}
    for index, one in zip(indices, said, strict=True):
        same = next((old for old in earlier if old[:2] == one[:2]), None)
        if one.answer.problem is None or same is None:
            found.append(one)
        else:
            found.append(same)
            broken[one.model] = ConfigProblems([*import_problems(models, [index], [one.answer], sources)])
    return found, broken


def described(
    models: Sequence[ModelEntry],
    indices: Sequence[int],
    said: Sequence[Said],
    data: Any,
    sources: Sources,
) -> list[Override]:
    """What the callables of these models say beyond the ``data`` of the configuration. Raises ConfigProblems:
    a callable cannot be asked, or does not say what is needed.
    """
    answers = [one.answer for one in said]
    problems = list(import_problems(models, indices, answers, sources))
    values: list[Override] = []
    for index, answer in zip(indices, answers, strict=True):
        entry = data["models"][index]
        if answer.problem is None:
            problems += _unknown(index, models[index], {*entry, *answer.declared}, sources)
        label = str(models[index].callable)
        values += _missing(answer.declared, entry, ("models", index), label)
    if problems:
        raise ConfigProblems(problems)
    return values


def _question(entry: ModelEntry, base_dir: str) -> Question:
    from gpuserve.describe.asking import Question  # as above

    decides = _leaves_tensors(entry) and "decoupled" not in entry.given
    path, kwargs = callable_of(entry, base_dir)
    python = os.path.join(base_dir, entry.python) if entry.python else ""
    decoupled = None if decides else entry.decoupled
    return Question(path, base_dir, kwargs, decoupled, python, _leaves_tensors(entry))


def import_problems(
    models: Sequence[ModelEntry], indices: Iterable[int], answers: Iterable[Answer], sources: Sources
) -> Iterator[Problem]:
    for index, answer in zip(indices, answers, strict=True):
        if answer.problem is not None:
            text = answer.problem
            if sources.document is not None:
                text = f"model {models[index].name!r}: {text}"
            yield sources.problem(("models", index, "callable"), text)


def _missing(said: Mapping[str, Any], given: Any, path: Path, label: str) -> Iterator[Override]:
    """The values that are not given; of a mapping that is given in part, its other keys."""
    for key, value in said.items():
        if key not in mapping(given):
            yield Override((*path, key), value, label, Origin.ATTRIBUTE)
        elif isinstance(value, Mapping) and isinstance(given[key], Mapping):
            yield from _missing(value, given[key], (*path, key), label)


def _unknown(index: int, entry: ModelEntry, known: Collection[Any], sources: Sources) -> Iterator[Problem]:
    for key, flag in _TENSORS.items():
        if key in known:
            continue
        ways = f"give the callable types (gpuserve.typed) or an attribute {key} = [Tensor(…)]"
        text = f"its {key} are not known: {ways}, or "
        if sources.document is None:
            yield Problem(sources.name, f"{text}use {flag} {TENSOR_FORM}", Origin.FLAG)
        else:
            yield sources.problem(("models", index), f"model {entry.name!r}: {text}write {key} here")
