"""Which tensors between the steps of an ensemble stay on a device: those that nobody but workers with a
device reads. Asked for each step of each request, since models come and go; what does not hold goes by the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuserve.errors import RequestError, Unavailable
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.v2 import StepRequest
from gpuserve.front.ensemble.plan import Plan, PlannedStep
from gpuserve.front.links import WorkerLink
from gpuserve.front.plane.export_memory import LentExport, all_reach
from gpuserve_worker.tensor import BYTES

#: Elements of these are looked at on the host before anybody is given them.
_ON_HOST: Final = frozenset({BYTES, "BOOL"})


class DevicePath:
    """``models`` finds the driver of a model's version, "" being the latest."""

    def __init__(self, models: Callable[[str, str], Driver]) -> None:
        self._models = models

    def kept(self, step: PlannedStep, plan: Plan) -> tuple[str, ...]:
        """The outputs that a step's worker is asked to keep on its device, by their names in its model."""
        owner = self._driver(step)
        if owner is None or not owner.device_inputs.instances or owner.spec.response_cache:
            return ()  # a cache would have to look at the bytes
        on_host = {one.name for one in owner.spec.outputs if one.datatype in _ON_HOST}
        return tuple(
            [
                theirs
                for theirs, ours in step.writes
                if ours not in plan.outputs and theirs not in on_host and self._is_read(owner, ours, plan)
            ]
        )

    def _is_read(self, owner: Driver, tensor: str, plan: Plan) -> bool:
        """Whether all who read a tensor can do so on the owner's devices."""
        readers: list[WorkerLink] = []
        for step in plan.steps:
            for theirs, ours in step.reads:
                if ours != tensor:
                    continue
                driver = self._driver(step)
                if driver is None or not can_read(driver, theirs) or not driver.instances:
                    return False
                readers += driver.instances.links()
        owners = [link for link in owner.instances.links() if link.instance in owner.device_inputs.instances]
        return all_reach(owners, readers)

    def _driver(self, step: PlannedStep) -> Driver | None:
        try:
            return self._models(step.model, step.version)
        except RequestError:  # which the step is told when it is sent
            return None


def can_read(driver: Driver, name: str) -> bool:
    """Whether every instance of a model can be given this input from another worker's device."""
    return name in driver.device_inputs.everywhere and not driver.spec.response_cache


def check_readable(driver: Driver, request: StepRequest) -> None:
    """Do nothing where a model can be given the inputs of a step.

    Raises:
        Unavailable: it was exchanged for one that cannot, after they had been kept on a device.
    """
    for one in request.inputs:
        if isinstance(one.data, LentExport) and not can_read(driver, one.name):
            raise Unavailable(
                f"model {driver.spec.name!r} was exchanged while a request for it was under way: its input "
                f"{one.name!r} is on a GPU, where the model cannot read it any more"
            )
