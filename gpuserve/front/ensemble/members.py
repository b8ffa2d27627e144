"""The models that an ensemble asks, as it finds them at each step: they come and go while it is served."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from gpuserve.ensemble_spec import StepSpec
from gpuserve.errors import NotFound, RequestError, Unavailable, Unimplemented
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.v2 import StepRequest
from gpuserve.front.ensemble.device_path import DevicePath, check_readable
from gpuserve.front.ensemble.plan import Plan, PlannedStep
from gpuserve.front.plane.blocks import free_body
from gpuserve.front.plane.regions import RegionTable
from gpuserve.front.scheduler.pending import PendingRequest

#: Ensembles within ensembles. One that comes back to itself, by models that were exchanged, ends here.
MAX_DEPTH: Final = 16


class Members:
    """``models`` finds the driver of a model's version, "" being the latest."""

    def __init__(self, models: Callable[[str, str], Driver], regions: RegionTable) -> None:
        self._models = models
        self._regions = regions
        self._device_path = DevicePath(models)

    def are_ready(self, steps: Iterable[StepSpec]) -> bool:
        """Whether each of these steps would find its model ready."""
        try:
            return all(self._models(one.model, str(one.version or "")).ready for one in steps)
        except (NotFound, Unavailable):
            return False

    def kept(self, step: PlannedStep, plan: Plan) -> tuple[str, ...]:
        """The outputs of a step that stay on the device of whoever makes them."""
        return self._device_path.kept(step, plan)

    def submit(self, request: StepRequest) -> PendingRequest:
        """Queue one step, whose regions stay until it is through.

        Raises:
            RequestError: there is no such model now, it gives streams, or it refuses; the body is freed.
        """
        try:
            driver = self._find(request)
        except RequestError:
            free_body(request)
            raise
        if not request.regions:
            return driver.submit(request)
        self._regions.pin_again(request)
        try:
            return driver.submit(request)
        except BaseException:
            self._regions.unpin(request)
            raise

    def _find(self, request: StepRequest) -> Driver:
        try:
            driver = self._models(request.model_name, request.model_version)
        except NotFound as error:  # which is no fault of the client's
            raise Unavailable(str(error)) from None
        if driver.spec.decoupled:
            raise Unimplemented(
                f"model {driver.spec.name!r} is decoupled, and a step needs one response to each request"
            )
        if request.depth > MAX_DEPTH:
            raise Unimplemented(f"there are more than {MAX_DEPTH} ensembles within one another")
        check_readable(driver, request)
        return driver
