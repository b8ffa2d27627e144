"""Whose trace settings count for a model: its own where it has any, those of the server for the rest, and
those of the start where the server was given none. Pure.

::

    start ──► server (global overrides) ──► model (its overrides)

A setting that is taken back falls to the scope on its left. As in Triton, what is left of ``trace_count``
is the setting's value from then on, and a scope that has a count of its own keeps it over other updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpuserve.config.settings.server import TraceSettings
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.observe.tracing.values import Overrides, TraceLevel, TraceValues, applied, start_values


class Sampler:
    """Chooses which requests of one scope are traced: one in so many, and no more than so many."""

    __slots__ = ("left", "overrides", "values")

    def __init__(self, values: TraceValues, overrides: Overrides | None = None) -> None:
        self.values = values
        self.overrides = overrides or {}
        #: So many requests, and the last of them is traced.
        self.left = values.rate

    @property
    def level(self) -> TraceLevel:
        return TraceLevel(self.values.level)

    def sample(self, forced: bool = False) -> bool:
        """Whether the next request is traced. ``forced``: its caller traces it, whatever the rate."""
        if not forced:
            self.left -= 1
            if self.left > 0:
                return False
        values = self.values
        if not values.level or not values.count or not values.rate:
            return False
        if not forced:
            self.left = values.rate
        if values.count > 0:
            self.values = dataclasses.replace(values, count=values.count - 1)
        return True

    def current_overrides(self) -> Overrides:
        """Its overrides, with what is left of its count."""
        if "count" not in self.overrides:
            return self.overrides
        return self.overrides | {"count": self.values.count}


class TraceScopes:
    """The trace settings of the server, and of each model that has its own."""

    def __init__(self, start: TraceSettings) -> None:
        self.start = start
        self._initial = start_values(start)
        self._server = Sampler(self._initial)
        self._models: dict[str, Sampler] = {}

    def sampler(self, model: str = "") -> Sampler:
        """The sampler of a model's requests; models without settings of their own share the server's."""
        return self._models.get(model, self._server)

    def values(self, model: str = "") -> TraceValues:
        return self.sampler(model).values

    def is_own(self, model: str) -> bool:
        return model in self._models

    def update(self, model: str, read: Mapping[str, int | None]) -> None:
        """Change the settings of a model ("": the server); InvalidArgument: nothing could be traced."""
        scope = self._models.get(model) if model else self._server
        overrides = applied(scope.current_overrides() if scope is not None else {}, read)
        values = self._merged(model, overrides)
        problem = values.problem(self.start)
        if problem is not None:
            raise InvalidArgument(f"Attempting to set invalid trace setting :{problem}")
        if not model:
            self._server = Sampler(values, overrides)
            self._refresh_models()
        elif overrides:
            self._models[model] = Sampler(values, overrides)
        else:
            self._models.pop(model, None)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def to_wire(self) -> dict[str, Any]:
        models = {name: scope.current_overrides() for name, scope in self._models.items()}
        return {"server": self._server.current_overrides(), "models": models}

    def restore(self, wire: Mapping[str, Any]) -> None:
        overrides: Overrides = dict(wire["server"])
        self._server = Sampler(self._merged("", overrides), overrides)
        self._models = {
            name: Sampler(self._merged(name, own), dict(own)) for name, own in wire["models"].items()
        }

    def _refresh_models(self) -> None:
        for name, scope in self._models.items():
            overrides = scope.current_overrides()
            self._models[name] = Sampler(self._merged(name, overrides), overrides)

    def _merged(self, model: str, overrides: Overrides) -> TraceValues:
        fallback = self._server.values if model else self._initial
        return dataclasses.replace(fallback, **overrides)
