"""``LocalEnsemble``: an ensemble whose steps are asked of local models, by the plan that a front follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from gpuserve.front.models.ensembles.plan import PlannedStep, RunProgress, plans_of
from gpuserve.front.v2.validation import check_of
from gpuserve.model.spec import ModelSpec
from gpuserve.testing.answers import Outputs
from gpuserve.testing.local_model import LocalModel, asked_of, outputs_of, replies_of
from gpuserve.testing.requests import LocalRequest, WrongCall, checked_arrays
from gpuserve_worker.calling.calls import CallReply
from gpuserve_worker.calling.failure import failure_of
from gpuserve_worker.calling.questions import CallRequest, ModelCallError

#: A model that can be asked in this process.
LocalOne: TypeAlias = "LocalModel | LocalEnsemble"


class LocalEnsemble:
    """An ensemble that is asked in the calling thread, one step after the other. ``find`` finds the model
    of a step by its name and version, "" being the newest.
    """

    def __init__(self, spec: ModelSpec, find: Callable[[str, str], LocalOne]) -> None:
        self.spec = spec
        self._find = find
        self._check = check_of(spec)
        self._plan = plans_of(spec)

    def load(self) -> None:
        """Do nothing: its models are loaded by themselves."""

    def close(self) -> None:
        """Do nothing: it holds nothing of its own."""

    def answers(self, requests: Sequence[LocalRequest]) -> list[Outputs | ModelCallError | None]:
        """The answer to each request; raises ModelCallError where a request or a step of it is refused."""
        return [self._answer(one) for one in requests]

    def responses(self, request: LocalRequest) -> Iterator[Outputs]:
        """The one response to a request; raises as ``answers``."""
        yield self._answer(request)

    def answer_call(self, request: CallRequest) -> list[CallReply]:
        """Answer a local model that asks this ensemble."""
        return replies_of(self.answers([asked_of(request)]), request)

    def _answer(self, request: LocalRequest) -> Outputs:
        tensors, _ = checked_arrays(self.spec, self._check, request)
        plan = self._plan(tuple(request.requested_outputs))
        progress = RunProgress(plan)
        parameters: dict[str, Any] = {}
        while steps := progress.next_steps():
            for step in steps:
                found = self._run(step, request, tensors)
                parameters |= found.parameters
                tensors |= {ours: found[theirs] for theirs, ours in step.writes if theirs in found}
                progress.done(step)
        return Outputs({name: tensors[name] for name in plan.outputs if name in tensors}, parameters)

    def _run(self, step: PlannedStep, request: LocalRequest, tensors: dict[str, object]) -> Outputs:
        inputs = {theirs: tensors[ours] for theirs, ours in step.reads if ours in tensors}
        wanted = tuple(theirs for theirs, _ in step.writes)
        asked = request._replace(inputs=inputs, requested_outputs=wanted)
        try:
            return outputs_of(self._find(step.model, step.version).answers([asked]))[0]
        except WrongCall:
            raise
        except Exception as error:  # the callable of a step may raise anything
            code, text = failure_of(error)
            within = ModelCallError(code, f"in ensemble '{self.spec.name}', {text}")
            raise within from (error if error.__cause__ is None else error.__cause__)
