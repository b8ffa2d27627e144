"""The model table: drivers by name and version, a decimal text; "" is the highest ready version."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from gpuserve.core.errors import InvalidArgument, NotFound, Unavailable
from gpuserve.front.models.model_driver import STARVED, Driver
from gpuserve.front.observability.gpu_health.gpu_monitor import GpuWatch
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import IndexEntry
from gpuserve.front.requests.limits import shown, suggested
from gpuserve.front.requests.server_status import HealthSubscribers
from gpuserve.front.requests.statistics import StatisticsEntry
from gpuserve.model.spec import ModelSpec
from gpuserve.model.triton_config import model_config, platform_of
from gpuserve_worker.protocol.tensor import TensorSpec

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_MAX_VERSION: Final = (1 << 63) - 1


class ModelTable:
    """All served model versions, and the states of all models that the supervisor knows.

    ``latest`` has the driver of each model for requests without a version. ``watchers`` are notified of every
    change; ``gpus`` reports the memory of models.
    """

    def __init__(self, gpus: GpuWatch, watchers: HealthSubscribers) -> None:
        self._gpus = gpus
        self._watchers = watchers
        self.latest: dict[str, Driver] = {}
        #: Drivers by (name, version text), the usual form in requests.
        self._by_text: dict[tuple[str, str], Driver] = {}
        self._versions: dict[str, dict[int, Driver]] = {}
        self._states: dict[str, Sequence[tuple[int, str, str]]] = {}
        #: The models with ``openai: true``.
        self._for_openai: set[str] = set()
        #: The models of attached programs.
        self._attached: set[str] = set()
        self._accepting = True

    # ---- changes ----------------------------------------------------------------------------

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
        """Let exactly these drivers serve a model; without drivers the model is no longer served."""
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
        """Update the latest version. A version counts from its first ready instance on."""
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
        """Record the version states of a model from ``messages.ModelStates``."""
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

    # ---- enumeration ------------------------------------------------------------------------

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
        """Return all drivers but those of attached programs, which do not affect readiness."""
        return [driver for driver in self.all() if driver.spec.name not in self._attached]

    def is_attached(self, name: str) -> bool:
        """Return whether a model belongs to an attached program."""
        return name in self._attached

    def names(self) -> set[str]:
        return self._versions.keys() | self._states.keys()

    def has_openai(self) -> bool:
        """Return whether any model is served to OpenAI clients."""
        return bool(self._for_openai)

    def find_for_openai(self, name: str) -> Driver:
        """Return the latest version of a model by its name or by one of its ``openai_names``. Raise as
        ``find``.
        """
        if name not in self.latest:
            for one in self._for_openai:
                driver = self.latest.get(one)
                if driver is not None and name in driver.spec.openai_names:
                    return driver
        return self.find(name)

    def devices(self) -> set[str]:
        return {one.first_device for driver in self.all() for one in driver.spec.instances}

    def metrics(self) -> list[ModelMetrics]:
        return [driver.metrics for driver in self.all()]

    # ---- queries ------------------------------------------------------------------------------

    def find(self, name: str, version: str = "") -> Driver:
        """Return the driver of a version, "" for the latest. Raise a ``RequestError`` if there is none."""
        driver = self._by_text.get((name, version)) if version else self.latest.get(name)
        if driver is not None:
            return driver
        number = version_number(name, version) if version else 0
        if driver := self._versions.get(name, {}).get(number):  # the version text has another form
            return driver
        unknown = f"Request for unknown model: '{shown(name)}'"
        if name not in self._versions and name not in self._states:
            raise NotFound(f"{unknown} is not found{suggested(name, self._versions)}")
        if not version:
            raise NotFound(f"{unknown} has no available versions")
        if number in {one for one, _, _ in self._states.get(name, ())}:
            raise Unavailable(f"{unknown} version {number} is not at ready state")
        listed = ", ".join(map(str, sorted(self._versions.get(name, ()))))
        only = f", only versions {listed} are" if "," in listed else f", only version {listed} is"
        raise NotFound(f"{unknown} version {number} is not found{listed and only}")

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """Return the fields of a version's ``ModelMetadataResponse``, batch axes as -1; see ``find``."""
        spec = self.find(name, version).spec
        versions = () if version else [str(one.spec.version) for one in self.of(name) if one.ready]
        batch = (-1,) if spec.max_batch_size else ()

        def described(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
            return [
                {"name": one.name, "datatype": one.datatype, "shape": (*batch, *one.shape)} for one in tensors
            ]

        return {
            "name": spec.name,
            "versions": versions or [str(spec.version)],
            "platform": platform_of(spec),
            "inputs": described(spec.inputs),
            "outputs": described(spec.outputs),
        }

    def config(self, name: str, version: str) -> Any:
        """Return the ``ModelConfig`` message of a version, "" being the latest. Raises as ``find``."""
        spec = self.find(name, version).spec
        return model_config(spec, [one.version for one in self.specs(spec.name)])

    def statistics(self, name: str = "", version: str = "") -> Iterator[StatisticsEntry]:
        """Return an iterator over the statistics of a version, a model, or all models, each read when it is
        reached.

        Raises InvalidArgument for an unknown model or version.
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
        """Return every model version with its state. A never-loaded model has no version."""
        entries = [entry for name in sorted(self.names()) for entry in self._entries(name)]
        return [one for one in entries if one.state == "READY" or not ready_only]

    def _entries(self, name: str) -> list[IndexEntry]:
        known = {version: (state, reason) for version, state, reason in self._states.get(name, ())}
        served = self._versions.get(name, {})
        if not served and known.keys() == {0}:
            return [IndexEntry(name, "", *known[0])]  # the versions are unknown
        entries = []
        for version in sorted((known.keys() | served.keys()) - {0}):
            state, reason = known.get(version, ("", ""))
            if version in served:
                state, reason = _serving_state(served[version], state)
            entries.append(IndexEntry(name, str(version), state, reason))
        return entries


def _serving_state(driver: Driver, known: str) -> tuple[str, str]:
    if driver.ready:
        return "READY", ""
    if known == "LOADING":
        return "LOADING", ""
    if driver.is_starved:
        return "UNAVAILABLE", STARVED
    missing = "a model of its steps is not ready" if driver.spec.is_ensemble else "no live instance"
    return "UNAVAILABLE", missing


def version_number(name: str, version: str) -> int:
    """Parse a non-empty version text. Raise InvalidArgument if it is not a positive integer of 63 bits."""
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
