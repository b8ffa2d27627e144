"""The models that an ensemble asks, found at each step, as they come and go; and which tensors between the
steps stay on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from gpuserve.core.errors import NotFound, RequestError, Unavailable, Unimplemented
from gpuserve.front.links.export_memory import LentExport, all_reach
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.blocks import free_body
from gpuserve.front.memory.regions import RegionTable
from gpuserve.front.models.ensembles.plan import EnsemblePlan, PlannedStep
from gpuserve.front.models.interface import Driver
from gpuserve.front.models.model_workers import ModelWorkers
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.requests.inference import InferRequest
from gpuserve.model.spec import StepSpec
from gpuserve_worker.protocol.tensor import BYTES

#: Ensembles within ensembles. One that comes back to itself, by models that were exchanged, ends here.
MAX_DEPTH: Final = 16
#: Elements of these are looked at on the host before anybody is given them.
_ON_HOST: Final = frozenset({BYTES, "BOOL"})


class Members:
    """``models`` finds the driver of a model's version, "" being the latest."""

    def __init__(self, models: Callable[[str, str], Driver], regions: RegionTable) -> None:
        self._models = models
        self._regions = regions

    def are_ready(self, steps: Iterable[StepSpec]) -> bool:
        try:
            return all(self._models(one.model, str(one.version or "")).ready for one in steps)
        except (NotFound, Unavailable):
            return False

    def submit(self, request: InferRequest) -> PendingRequest:
        """Queue one step, whose regions stay until it is through; RequestError: refused, its body freed."""
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

    def _find(self, request: InferRequest) -> Driver:
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

    def asked(self, step: PlannedStep) -> tuple[str, ...]:
        """The outputs that a step is asked for by name: none where its model may leave some of them out, for
        who names an output wants it.
        """
        driver = self._driver(step)
        if driver is not None and not driver.spec.strict:
            return ()
        return tuple([theirs for theirs, _ in step.writes])

    # ---- on devices -----------------------------------------------------------------------

    def kept(self, step: PlannedStep, plan: EnsemblePlan) -> tuple[str, ...]:
        """The outputs that a step's worker is asked to keep on its device, by their names in its model."""
        owner = self._driver(step)
        if owner is None or owner.workers is None or owner.spec.response_cache:
            return ()  # a cache would have to look at the bytes
        if not owner.workers.device_inputs.instances:
            return ()
        on_host = {one.name for one in owner.spec.outputs if one.datatype in _ON_HOST}
        return tuple(
            [
                theirs
                for theirs, ours in step.writes
                if ours not in plan.outputs
                and theirs not in on_host
                and self._is_read(owner.workers, ours, plan)
            ]
        )

    def _is_read(self, owner: ModelWorkers, tensor: str, plan: EnsemblePlan) -> bool:
        """Whether all who read a tensor can do so on the owner's devices."""
        readers: list[WorkerLink] = []
        for step in plan.steps:
            for theirs, ours in step.reads:
                if ours != tensor:
                    continue
                driver = self._driver(step)
                if driver is None or driver.workers is None or not can_read(driver, theirs):
                    return False
                if not driver.workers.instances:
                    return False
                readers += driver.workers.instances.up.values()
        on_device = owner.device_inputs.instances
        owners = [link for link in owner.instances.up.values() if link.instance in on_device]
        return all_reach(owners, readers)

    def _driver(self, step: PlannedStep) -> Driver | None:
        try:
            return self._models(step.model, step.version)
        except RequestError:  # which the step is told when it is sent
            return None


def can_read(driver: Driver, name: str) -> bool:
    """Whether every instance of a model can be given this input from another worker's device."""
    if driver.workers is None or driver.spec.response_cache:
        return False
    return name in driver.workers.device_inputs.everywhere


def check_readable(driver: Driver, request: InferRequest) -> None:
    """Raise Unavailable where a model was exchanged for one that cannot be given the inputs of a step."""
    for one in request.inputs:
        if isinstance(one.data, LentExport) and not can_read(driver, one.name):
            raise Unavailable(
                f"model {driver.spec.name!r} was exchanged while a request for it was under way: its input "
                f"{one.name!r} is on a GPU, where the model cannot read it any more"
            )
