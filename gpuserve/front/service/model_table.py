"""Which drivers serve which version of which model. Versions are positive integers, on the wire decimal text;
"" is the highest that is ready.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from gpuserve.core.errors import InvalidArgument, NotFound, Unavailable
from gpuserve.front.models.interface import STARVED, Driver
from gpuserve.front.observe.gpu_health.watch import GpuWatch
from gpuserve.front.observe.metrics import ModelMetrics
from gpuserve.front.v2.health import Watchers
from gpuserve.front.v2.limits import shown, suggested
from gpuserve.front.v2.model_config import model_config, platform_of
from gpuserve.front.v2.statistics import StatisticsEntry
from gpuserve.front.v2.types import IndexEntry
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_MAX_VERSION: Final = (1 << 63) - 1


class ModelTable:
    """The versions of every model that get requests, and the states of all that the supervisor knows.
    ``latest`` has the driver of each model for requests without a version. ``watchers`` are told of every
    change; ``gpus`` says what memory models have.
    """

    def __init__(self, gpus: GpuWatch, watchers: Watchers) -> None:
        self._gpus = gpus
        self._watchers = watchers
        self.latest: dict[str, Driver] = {}
        #: By what a request says, which is how versions are written most of the time.
        self._by_text: dict[tuple[str, str], Driver] = {}
        self._versions: dict[str, dict[int, Driver]] = {}
        self._states: dict[str, Sequence[tuple[int, str, str]]] = {}
        #: The models with ``openai: true``.
        self._for_openai: set[str] = set()
        #: The models of attached programs.
        self._attached: set[str] = set()
        self._accepting = True

    # ---- what is served -------------------------------------------------------------------

    def add(self, driver: Driver, *, attached: bool = False) -> None:
        name = driver.spec.name
        if attached:
            self._attached.add(name)
        self.serve(name, [*self.of(name), driver])

    def remove(self, driver: Driver) -> None:
        name = driver.spec.name
        self.serve(name, [one for one in self.of(name) if one is not driver])
        if name not in self._versions:
            self._attached.discard(name)

    def serve(self, name: str, drivers: Iterable[Driver]) -> None:
        """Let these drivers, and no others, serve a model from now on; none: it is served no more."""
        for version in self._versions.pop(name, {}):
            del self._by_text[name, str(version)]
        versions = {driver.spec.version: driver for driver in drivers}
        if versions:
            self._versions[name] = versions
            self._by_text |= {(name, str(version)): driver for version, driver in versions.items()}
        if not self._accepting:
            for driver in versions.values():
                driver.stop_accepting()
        self.refresh(name)

    def refresh(self, name: str) -> None:
        """Find the latest version anew; one counts from its first instance on, also while all start again."""
        drivers = self.of(name)
        loaded = [driver for driver in drivers if driver.was_ready]
        if drivers:
            self.latest[name] = (loaded or drivers)[-1]
        else:
            self.latest.pop(name, None)
        if any(driver.spec.openai for driver in drivers):
            self._for_openai.add(name)
        else:
            self._for_openai.discard(name)
        self._watchers.changed()

    def set_states(self, name: str, states: Sequence[tuple[int, str, str]]) -> None:
        """Note what the supervisor says of the versions of a model, as ``messages.ModelStates`` has it."""
        if states:
            self._states[name] = states
        else:
            self._states.pop(name, None)
        self._watchers.changed()

    def states_of(self, name: str) -> Sequence[tuple[int, str, str]]:
        return self._states.get(name, ())

    def stop_accepting(self) -> None:
        self._accepting = False
        for driver in self.all():
            driver.stop_accepting()

    # ---- which there are ------------------------------------------------------------------

    def of(self, name: str) -> list[Driver]:
        versions = self._versions.get(name, {})
        return [versions[version] for version in sorted(versions)]

    def specs(self, name: str) -> list[ModelSpec]:
        return [driver.spec for driver in self.of(name)]

    def all(self) -> list[Driver]:
        return [driver for versions in self._versions.values() for driver in versions.values()]

    def all_specs(self) -> list[ModelSpec]:
        return [driver.spec for driver in self.all()]

    def own(self) -> list[Driver]:
        """The same without those of attached programs, which cannot take the server out of service."""
        return [driver for driver in self.all() if driver.spec.name not in self._attached]

    def is_attached(self, name: str) -> bool:
        """Whether a model is an attached program's."""
        return name in self._attached

    def names(self) -> set[str]:
        return self._versions.keys() | self._states.keys()

    def has_openai(self) -> bool:
        """Return whether any model is for OpenAI's clients."""
        return bool(self._for_openai)

    def devices(self) -> set[str]:
        return {one.device for driver in self.all() for one in driver.spec.instances}

    def metrics(self) -> list[ModelMetrics]:
        return [driver.metrics for driver in self.all()]

    # ---- what is asked --------------------------------------------------------------------

    def find(self, name: str, version: str = "") -> Driver:
        """The driver of a version, "" being the latest; raises NotFound, Unavailable or InvalidArgument."""
        driver = self._by_text.get((name, version)) if version else self.latest.get(name)
        if driver is not None:
            return driver
        number = version_number(name, version) if version else 0
        if driver := self._versions.get(name, {}).get(number):  # it was written in another way
            return driver
        unknown = f"Request for unknown model: '{shown(name)}'"
        if name not in self._versions and name not in self._states:
            raise NotFound(f"{unknown} is not found{suggested(name, self._versions)}")
        if not version:
            raise NotFound(f"{unknown} has no available versions")
        if number in {one for one, _, _ in self._states.get(name, ())}:
            raise Unavailable(f"{unknown} version {number} is not at ready state")
        raise NotFound(
            f"{unknown} version {number} is not found{_others(sorted(self._versions.get(name, ())))}"
        )

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """The fields of a version's ``ModelMetadataResponse``, batch axes as -1; raises as ``find``."""
        spec = self.find(name, version).spec
        versions = () if version else [str(one.spec.version) for one in self.of(name) if one.ready]
        batch = (-1,) if spec.max_batch_size else ()

        def told(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
            return [
                {"name": one.name, "datatype": one.datatype, "shape": (*batch, *one.shape)} for one in tensors
            ]

        return {
            "name": spec.name,
            "versions": versions or [str(spec.version)],
            "platform": platform_of(spec),
            "inputs": told(spec.inputs),
            "outputs": told(spec.outputs),
        }

    def config(self, name: str, version: str) -> Any:
        """The ``ModelConfig`` message of a version, "" being the latest; raises as ``find``."""
        spec = self.find(name, version).spec
        return model_config(spec, [one.version for one in self.specs(spec.name)])

    def statistics(self, name: str = "", version: str = "") -> Iterator[StatisticsEntry]:
        """What became of requests of a version, a model, or all models, each at the time when it is taken;
        raises InvalidArgument.
        """
        number = version and str(version_number(name, version))
        found = self.of(name) if name else [one for each in sorted(self._versions) for one in self.of(each)]
        if name and not found:
            raise InvalidArgument(f"requested model '{shown(name)}' is not available")
        if name and number:
            found = [one for one in found if str(one.spec.version) == number]
            if not found:
                raise InvalidArgument(f"requested model version is not available for model '{shown(name)}'")
        return (
            one.metrics.statistics_entry(self._gpus.memory_of(one.spec.name, one.metrics.version))
            for one in found
        )

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Every version of every model with its state; a model that was never loaded by its name alone."""
        entries = [entry for name in sorted(self.names()) for entry in self._entries(name)]
        return [one for one in entries if one.state == "READY" or not ready_only]

    def _entries(self, name: str) -> list[IndexEntry]:
        said = {version: (state, reason) for version, state, reason in self._states.get(name, ())}
        served = self._versions.get(name, {})
        if not served and said.keys() == {0}:
            return [IndexEntry(name, "", *said[0])]  # its versions are not known
        entries = []
        for version in sorted((said.keys() | served.keys()) - {0}):
            state, reason = said.get(version, ("", ""))
            if version in served:
                state, reason = _state_of(served[version], state)
            entries.append(IndexEntry(name, str(version), state, reason))
        return entries


def _state_of(driver: Driver, said: str) -> tuple[str, str]:
    if driver.ready:
        return "READY", ""
    if said == "LOADING":
        return "LOADING", ""
    if driver.is_starved:
        return "UNAVAILABLE", STARVED
    missing = "a model of its steps is not ready" if driver.spec.is_ensemble else "no live instance"
    return "UNAVAILABLE", missing


def _others(versions: Sequence[int]) -> str:
    """The end of an error's text that says which versions there are instead."""
    if not versions:
        return ""
    listed = ", ".join(map(str, versions))
    return f", only version {listed} is" if len(versions) == 1 else f", only versions {listed} are"


def version_number(name: str, version: str) -> int:
    """A version as sent on the wire, not empty; InvalidArgument: not a positive integer of 63 bits."""
    if _INTEGER.fullmatch(version) is None or (number := int(version)) > _MAX_VERSION:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{shown(version)}' "
            f"(details: stol), version should be an integral value > 0 for model '{shown(name)}'"
        )
    if number <= 0:
        raise InvalidArgument(
            f"invalid model version specified '{shown(version)}' , version should be an integral value > 0 "
            f"for model '{shown(name)}'"
        )
    return number
