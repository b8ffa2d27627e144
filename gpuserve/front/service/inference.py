"""Inference: requests on their way to the driver of a model, whichever door they came by."""

from __future__ import annotations

from typing import Protocol

from gpuserve.core.errors import RequestError
from gpuserve.front.memory.blocks import free_body
from gpuserve.front.models.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.observe.access_log import notes_of
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.v2 import classification
from gpuserve.front.v2.types import InferRequest, InferResponse
from gpuserve.model.spec import ModelSpec, StepSpec
from gpuserve_worker.memory.arena import Block


class Pins(Protocol):
    """Who keeps the regions of requests while they run; see ``RegionTable``."""

    def pin(self, request: InferRequest) -> None: ...

    def unpin(self, request: InferRequest) -> None: ...


class Inference:
    """Runs requests on ``models``. Regions of shared memory that a request names stay while it runs."""

    def __init__(self, models: ModelTable, regions: Pins) -> None:
        self._find = models.find
        #: The table's own: a request without a version needs one look-up.
        self._latest = models.latest
        self._regions = regions

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        """Queue one request as ``Driver.submit`` does; RequestError: it is refused, and its body freed."""
        try:
            driver = None if request.model_version else self._latest.get(request.model_name)
            if driver is None:
                driver = self._find(request.model_name, request.model_version)
            if request.regions:
                self._regions.pin(request)
        except RequestError:
            free_body(request)
            raise
        if not request.regions:
            return driver.submit(request, on_response, on_answer)
        try:
            return driver.submit(request, on_response, on_answer)
        except BaseException:
            self._regions.unpin(request)
            raise

    def classify(self, response: InferResponse, pending: PendingRequest) -> None:
        """Put the classes that the request asks for in its outputs' place; InvalidArgument: one has none."""
        classification.classify(response, pending.request.class_counts, pending.spec, self._member)

    def _member(self, step: StepSpec) -> ModelSpec | None:
        """The model of a step of an ensemble; None where it is not served."""
        try:
            return self._find(step.model, str(step.version) if step.version else "").spec
        except RequestError:
            return None

    def claim(self, model_name: str, nbytes: int, model_version: str = "") -> Block | None:
        """Memory in the model's arena for a large input; None: the heap. RequestError: it is refused."""
        try:
            driver = self._find(model_name, model_version)
        except RequestError:  # said once the request is complete
            return None
        return driver.claim(nbytes)


class NotedInference(Inference):
    """The same, where there is an access log: each request is noted with the call that it came by."""

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        notes = notes_of(request)
        if notes is not None:
            notes.submitted(request)
        return super().submit(request, on_response, on_answer)
