"""Which drivers serve which version of which model, and what a client is told of those that nobody serves.

Versions are positive integers; on the wire they are decimal text, and "" is the highest that is ready.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gpuserve.errors import InvalidArgument, NotFound, Unavailable
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.limits import shown
from gpuserve.front.endpoint.v2 import IndexEntry

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_MAX_VERSION: Final = (1 << 63) - 1


class ModelTable:
    """The versions of every model that get requests, and the states of all that the supervisor knows.

    ``latest`` has the driver of each model for requests without a version.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Driver] = {}
        #: By what a request says, which is how versions are written most of the time.
        self._by_text: dict[tuple[str, str], Driver] = {}
        self._versions: dict[str, dict[int, Driver]] = {}
        self._states: dict[str, Sequence[tuple[int, str, str]]] = {}

    # ---- what is served -------------------------------------------------------------------

    def serve(self, name: str, drivers: Iterable[Driver]) -> None:
        """These, and no others, serve a model from now on; none: it is served no more."""
        for version in self._versions.pop(name, {}):
            del self._by_text[name, str(version)]
        versions = {driver.spec.version: driver for driver in drivers}
        if versions:
            self._versions[name] = versions
            self._by_text |= {(name, str(version)): driver for version, driver in versions.items()}
        self.refresh(name)

    def of(self, name: str) -> list[Driver]:
        """The drivers that serve a model, by version."""
        versions = self._versions.get(name, {})
        return [versions[version] for version in sorted(versions)]

    def refresh(self, name: str) -> None:
        """An instance of a model came up, or its versions are others: which is the latest may have changed.

        A version counts from its first instance on, also while all of them start again.
        """
        drivers = self.of(name)
        loaded = [driver for driver in drivers if driver.was_ready]
        if drivers:
            self.latest[name] = (loaded or drivers)[-1]
        else:
            self.latest.pop(name, None)

    def all(self) -> list[Driver]:
        """The drivers of every version of every model."""
        return [driver for versions in self._versions.values() for driver in versions.values()]

    # ---- what is asked --------------------------------------------------------------------

    def find(self, name: str, version: str) -> Driver:
        """The driver of a version; an empty one means the latest.

        Raises:
            NotFound: no such model, or no such version of it.
            Unavailable: the version exists, but is not loaded now.
            InvalidArgument: the version is not a positive integer.
        """
        driver = self._by_text.get((name, version)) if version else self.latest.get(name)
        if driver is not None:
            return driver
        number = version_number(name, version) if version else 0
        if driver := self._versions.get(name, {}).get(number):  # it was written in another way
            return driver
        unknown = f"Request for unknown model: '{shown(name)}'"
        if name not in self._versions and name not in self._states:
            raise NotFound(f"{unknown} is not found")
        if not version:
            raise NotFound(f"{unknown} has no available versions")
        if number in {one for one, _, _ in self._states.get(name, ())}:
            raise Unavailable(f"{unknown} version {number} is not at ready state")
        raise NotFound(
            f"{unknown} version {number} is not found{_others(sorted(self._versions.get(name, ())))}"
        )

    def ready_versions(self, name: str) -> tuple[str, ...]:
        """The versions of a model that take requests."""
        return tuple(str(driver.spec.version) for driver in self.of(name) if driver.ready)

    def names(self) -> set[str]:
        """The names of all models, loaded or not."""
        return self._versions.keys() | self._states.keys()

    # ---- the repository index -------------------------------------------------------------

    def set_states(self, name: str, states: Sequence[tuple[int, str, str]]) -> None:
        """What the supervisor says of the versions of a model, as ``messages.ModelStates`` has it."""
        if states:
            self._states[name] = states
        else:
            self._states.pop(name, None)

    def index(self) -> list[IndexEntry]:
        """Every version of every model with its state; a model that was never loaded by its name alone."""
        names = sorted(self._versions.keys() | self._states.keys())
        return [entry for name in names for entry in self._entries(name)]

    def _entries(self, name: str) -> list[IndexEntry]:
        said = {version: (state, reason) for version, state, reason in self._states.get(name, ())}
        served = self._versions.get(name, {})
        if not served and said.keys() == {0}:
            return [IndexEntry(name)]
        entries = []
        for version in sorted((said.keys() | served.keys()) - {0}):
            state, reason = said.get(version, ("", ""))
            if version in served:
                state, reason = _state_of(served[version], state)
            entries.append(IndexEntry(name, str(version), state, reason))
        return entries


def _state_of(driver: Driver, said: str) -> tuple[str, str]:
    """State and reason of a version that is served, but may not be ready."""
    if driver.ready:
        return "READY", ""
    if said == "LOADING":
        return "LOADING", ""
    missing = "a model of its steps is not ready" if driver.spec.is_ensemble else "no live instance"
    return "UNAVAILABLE", missing


def _others(versions: Sequence[int]) -> str:
    """Which versions there are instead."""
    if not versions:
        return ""
    listed = ", ".join(map(str, versions))
    return f", only version {listed} is" if len(versions) == 1 else f", only versions {listed} are"


def version_number(name: str, version: str) -> int:
    """A version of the model ``name`` as sent on the wire, where it is not empty.

    Raises:
        InvalidArgument: not a positive integer of 63 bits.
    """
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
