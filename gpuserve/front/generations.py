"""The drivers of every generation that the supervisor has told of: those that get requests, those whose
instances are still coming up, and those that finish what they have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.scheduler.driver import ModelDriver
from gpuserve.front.scheduler.saturation import saturation


class Generations:
    """Drivers by the number of their generation. Owner: ``close()`` leaves none open."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._drivers: dict[int, Driver] = {}
        self._served: dict[str, set[int]] = {}

    def get(self, number: int) -> Driver | None:
        """The driver of a generation; None where it was removed, and the word crossed ours."""
        return self._drivers.get(number)

    def of_workers(self, number: int) -> ModelDriver | None:
        """The same, where it has workers, as all but ensembles have."""
        driver = self._drivers.get(number)
        return driver if isinstance(driver, ModelDriver) else None

    def devices(self) -> set[str]:
        """Those that any of them has instances on."""
        return {one.device for driver in self._drivers.values() for one in driver.spec.instances}

    def add(self, number: int, driver: Driver, *, attached: bool, served: bool) -> None:
        """A generation exists from now on."""
        self._drivers[number] = driver
        if served:
            self._served.setdefault(driver.spec.name, set()).add(number)
            show(driver)
            self._service.add_model(driver, attached)

    def remove(self, number: int) -> None:
        """A generation is no more; whoever waits for it is refused."""
        driver = self._drivers.pop(number, None)
        if driver is None:
            return
        self._served.get(driver.spec.name, set()).discard(number)
        self._service.remove_model(driver)
        driver.close()

    def serve(self, model: str, numbers: Collection[int]) -> list[int]:
        """Let these, and no others, get a model's requests; those that did until now and are to retire."""
        before = self._served.get(model, set())
        now = {number for number in numbers if number in self._drivers}
        if now:
            self._served[model] = now
        else:
            self._served.pop(model, None)
        drivers = [self._drivers[number] for number in now]
        for driver in drivers:
            show(driver)
        retired = sorted(before - now)
        for number in retired:
            self._drivers[number].retire()
        self._service.serve_model(model, drivers)
        return retired

    def metrics(self, model: str, version: int) -> ModelMetrics | None:
        """What is counted already of a version, by the generation that is about to be replaced."""
        found = [
            driver.metrics
            for driver in self._drivers.values()
            if (driver.spec.name, driver.spec.version) == (model, version)
        ]
        return found[-1] if found else None

    def all(self) -> Iterable[Driver]:
        """Every driver."""
        return self._drivers.values()

    def unfinished(self) -> int:
        """How many requests wait or run."""
        return sum(driver.unfinished for driver in self._drivers.values())

    def accepted(self) -> int:
        """How many requests the present drivers have taken so far."""
        return sum(driver.scheduler.statistics().accepted for driver in self._drivers.values())

    def close(self) -> None:
        """Refuse whatever is not finished."""
        for driver in list(self._drivers.values()):
            driver.close()


def show(driver: Driver) -> None:
    """Let the metrics tell of this generation; those of a version are one account."""
    driver.metrics.gauges = partial(gauges, driver)
    driver.metrics.declared = lambda: driver.spec.instances


def gauges(driver: Driver) -> dict[str, float]:
    """What a driver's scheduler and arena know at this moment; what they do not know is left out."""
    counts = driver.scheduler.statistics()
    arena = driver.arena.statistics()
    part = saturation(driver.spec, counts)
    return {
        **({} if part is None else {"gpuserve_saturation": part}),
        "gpuserve_queue_requests": counts.queued,
        "gpuserve_running_requests": counts.running_requests,
        "gpuserve_arena_bytes": arena.nbytes,
        "gpuserve_arena_blocks": arena.blocks,
    }
