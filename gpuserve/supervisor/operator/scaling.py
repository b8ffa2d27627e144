"""The verb ``scale`` for several models at once: each in its own time, and one answer for all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from gpuserve.errors import GpuserveError, RequestError, Unavailable
from gpuserve.instance_counts import instances_by_device
from gpuserve.supervisor.operator.outcome import AnswerOutcome, Outcome, Tell, failed
from gpuserve.supervisor.served_models import ServedModels


class Scaling:
    """One request, whose names and numbers are good. ``counts``: instances on each device, by model."""

    def __init__(
        self, models: ServedModels, counts: Mapping[str, int], tell: Tell, answer: AnswerOutcome
    ) -> None:
        self._models = models
        self._counts = counts
        self._tell = tell
        self._answer = answer
        self._left = len(counts)
        self._result: dict[str, dict[str, int]] = {}
        self._errors: dict[str, GpuserveError] = {}

    def begin(self) -> None:
        """Scale all of them."""
        self._result = {model: {"before": self._present(model)} for model in self._counts}
        for model, count in self._counts.items():
            self._tell(f"model {model}: {self._result[model]['before']} to {count} instances on each device")
            self._models.resize(model, count, functools.partial(self._scaled, model))

    def _present(self, model: str) -> int:
        """How many a model has on a device; where they differ, on the one that has most."""
        specs = self._models.served(model)
        return max((n for one in specs for n in instances_by_device(one).values()), default=0)

    def _scaled(self, model: str, error: GpuserveError | None) -> None:
        self._result[model]["after"] = self._present(model)
        if error is not None:
            self._errors[model] = error
        self._left -= 1
        if not self._left:
            self._answer(self._outcome())

    def _outcome(self) -> Outcome:
        result: dict[str, Any] = {"models": self._result}
        if not self._errors:
            return Outcome("", "", result)
        first = next(iter(self._errors.values()))
        text = "; ".join(str(error) for error in self._errors.values())
        kind = type(first) if isinstance(first, RequestError) else Unavailable
        return failed(kind(text), result)
