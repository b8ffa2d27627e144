"""Models of a config without processes, and the face of what loads them, for tests of a reload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpuserve.core.errors import GpuserveError
from gpuserve.model.spec import InstanceSpec, ModelSpec, StepSpec
from gpuserve.supervisor.reload.config_changes import Action, ConfigModels, by_name


def model(name: str, *, size: int = 4, devices: Iterable[str] = ("cpu",), **keys: Any) -> ModelSpec:
    instances = tuple(InstanceSpec(f"{one}#{n}", one, {"path": "m.py:f"}) for n, one in enumerate(devices))
    return ModelSpec(name, (), (), size, instances, **keys)


def ensemble(name: str, *asked: str, size: int = 4) -> ModelSpec:
    steps = tuple(StepSpec(one, 0, (), ()) for one in asked)
    return ModelSpec(name, (), (), size, (), steps=steps)


def config(*specs: ModelSpec, wanted: Iterable[str] | None = None) -> ConfigModels:
    declared = by_name(specs)
    return ConfigModels(declared, frozenset(declared if wanted is None else wanted))


class Work:
    """The face of ``ConfigWork`` without processes. What is begun waits in ``begun`` for ``end()``."""

    def __init__(self, *served: str) -> None:
        self.served = set(served)
        self.begun: dict[str, tuple[Action, Any]] = {}
        self.order: list[str] = []
        self.names: list[str] = []
        self.even = True
        self.taken_back: list[str] = []
        self.undeclared_models: dict[str, str] = {}
        #: All whose names were told to have changed.
        self.told: set[str] = set()

    def cancel(self, name: str) -> None:
        self.taken_back.append(name)

    def is_served(self, name: str) -> bool:
        return name in self.served

    def scale_count(self, specs: Any) -> int | None:
        return 1 if self.even else None

    def names_changed(self, names: list[str]) -> None:
        self.names = names
        self.told.update(names)

    def undeclared(self, name: str, reason: str) -> None:
        self.undeclared_models[name] = reason

    def start(self, action: Action, name: str, specs: Any, answer: Any) -> None:
        self.begun[name] = (action, answer)
        self.order.append(name)

    def end(self, name: str, error: GpuserveError | None = None) -> None:
        action, answer = self.begun.pop(name)
        if error is None:
            (self.served.discard if action is Action.UNLOAD else self.served.add)(name)
        answer(error)
