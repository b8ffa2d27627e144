"""Models in this process: ``LocalModel`` and ``LocalEnsemble``, which can call each other."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, Unpack

import numpy as np

from gpuserve.core.errors import StartupError
from gpuserve.front.models.ensemble_plan import PlannedStep, RunProgress, plans_of
from gpuserve.front.requests.validation import model_check_for
from gpuserve.front.scheduling.refusals import no_stream
from gpuserve.model.rules import by_name
from gpuserve.model.spec import ModelSpec
from gpuserve.testing.local_requests import (
    LocalRequest,
    Outputs,
    WrongCall,
    batch_answers,
    checked_arrays,
    local_request,
    worker_batch,
)
from gpuserve.testing.local_steps import LocalSteps
from gpuserve_worker.execution.execution import await_only_result, is_deferred
from gpuserve_worker.inference import model_calls
from gpuserve_worker.inference.callable_loading import InferenceCallable, LoadError, build, locate
from gpuserve_worker.inference.callable_metrics import MetricRegistry
from gpuserve_worker.inference.failure import failure_of
from gpuserve_worker.inference.inference_request import accepts_batch
from gpuserve_worker.inference.model_calls import (
    LOAD,
    READY,
    CallOptions,
    CallReply,
    CallRequest,
    ModelCallError,
)
from gpuserve_worker.inference.model_context import ModelContext, enter_model
from gpuserve_worker.inference.outputs import OutputError, OutputRules
from gpuserve_worker.protocol.wire import WireRequest

Result = TypeVar("Result")


class LocalModels:
    """All models of a configuration in this process. ``others`` answer calls to other models."""

    def __init__(self, specs: Sequence[ModelSpec], others: Mapping[str, Other]) -> None:
        self._others = dict(others)
        self._models: dict[tuple[str, int], AnyLocalModel] = {}
        for spec in specs:
            source = {} if spec.is_ensemble else spec.instances[0].source
            if source.get("python"):
                text = f"model {spec.name!r} runs in a Python of its own, {source['python']}"
                raise WrongCall(f"{text}: expected workers=True")
            made = (
                LocalEnsemble(spec, self.find)
                if spec.is_ensemble
                else LocalModel(spec, source, OtherModels({}))
            )
            self._models[spec.name, spec.version] = made
        self._newest = {name: versions[-1].version for name, versions in by_name(specs).items()}
        self._loaded: list[AnyLocalModel] = []
        newest = {name: self._models[name, version] for name, version in self._newest.items()}
        for one in self._models.values():  # every model may call the newest versions of all models
            if isinstance(one, LocalModel):
                one.others.add(self._others | newest)

    def open(self) -> None:
        """Load every model. Raise StartupError if a model cannot be loaded; then none stays loaded."""
        try:
            for one in self._models.values():
                one.load()
                self._loaded.append(one)
        except LoadError as error:
            self.close()
            failed = StartupError(f"model {one.spec.name!r} could not be loaded: {error}")
            if error.traceback:
                failed.add_note(error.traceback)
            raise failed from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the models in reverse order of loading."""
        while self._loaded:
            self._loaded.pop().close()

    def find(self, model: str, version: str = "") -> AnyLocalModel:
        """Return a model by name and version, "" for the newest. Raise ModelCallError if there is none."""
        number = int(version) if version.isdigit() else self._newest.get(model, 0)
        found = self._models.get((model, number))
        if found is None:
            of = f" version {version}" if version and model in self._newest else ""
            raise ModelCallError("NOT_FOUND", f"Request for unknown model: '{model}'{of} is not found")
        return found

    def infer(self, model: str, version: str, requests: Sequence[LocalRequest]) -> list[Outputs]:
        """Return the outputs for requests that make one batch; raise ModelCallError with the error that a
        client would get, caused by the callable's exception, or WrongCall if no client could make these
        requests.
        """
        found = self.find(model, version)
        return _with_client_error(lambda: require_outputs(found.answers(requests)))

    def stream(self, model: str, version: str, request: LocalRequest) -> Iterator[Outputs]:
        """Yield the responses to a request as they are read. Raise as ``infer``."""
        responses = self.find(model, version).responses(request)
        while (one := _with_client_error(lambda: next(responses, None))) is not None:
            yield one


def _with_client_error(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except (ModelCallError, WrongCall):
        raise
    except Exception as error:  # user code may raise anything
        raise ModelCallError(*failure_of(error)) from error


_END: Final = object()


class LocalModel:
    """A model in this process, called as its worker would call it.

    The calling thread runs the model, or another thread if the calling thread runs an event loop. ``log`` has
    the lines that the model logged, each with a level of ``logging``. Exceptions of ``execute``, or of the
    callable, are raised unchanged.
    """

    def __init__(self, spec: ModelSpec, source: Mapping[str, Any], others: OtherModels) -> None:
        self.spec = spec
        self.others = others
        self.log: list[tuple[int, str]] = []
        self._source = dict(source)
        self._check = model_check_for(spec)
        self._context = contextvars.copy_context()
        self._loop = asyncio.Runner()
        self._call: InferenceCallable | None = None
        self._rules = OutputRules(
            spec.name, spec.outputs, batching=spec.max_batch_size > 0, strict=spec.strict, exact=spec.exact,
            decoupled=spec.decoupled,
        )  # fmt: skip

    def __enter__(self) -> LocalModel:
        self.load()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def load(self) -> None:
        """Import and create the callable. Raise ``LoadError`` if that fails."""

        spec = self.spec
        context = ModelContext(
            spec.name,
            spec.version,
            spec.instances[0].name if spec.instances else "cpu#0",
            "cpu",
            spec.inputs,
            spec.outputs,
            spec.max_batch_size,
            spec.batching.preferred_batch_sizes,
            spec.decoupled,
            self.others.calls,
            "numpy",
            MetricRegistry(),
            lambda level, text: self.log.append((level, text)),
        )

        def make() -> InferenceCallable:
            enter_model(context)
            may_yield = self.spec.decoupled or self.spec.exact or not self.spec.strict
            return build(locate(self._source), self._source, "cpu", may_yield=may_yield)

        self._call = _outside_loop(lambda: self._context.run(make))
        self.others.calls.open(self.others)

    def close(self) -> None:
        """Call the callable's ``close``, as a worker does when it stops."""
        self.others.calls.close("the model under test has ended")
        close = getattr(self._call, "close", None)
        if close is not None:
            _outside_loop(lambda: self._context.run(close))
        self._call = None
        _outside_loop(self._loop.close)

    def infer(self, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> Outputs:
        """Return the outputs for one request; ``options`` are those of ``ModelContext.infer``. Raise
        ModelCallError if a server or the model would refuse the request, or if its answer cannot be sent.
        """
        return self.infer_batch([inputs], **options)[0]

    def infer_batch(
        self, inputs: Sequence[Mapping[str, Any]], **options: Unpack[CallOptions]
    ) -> list[Outputs]:
        """Return the outputs for several requests, from one call of the callable. Raise as ``infer`` for the
        first failure, and WrongCall if a server would not merge the requests.
        """
        return require_outputs(self.answers([local_request(one, **options) for one in inputs]))

    def stream(self, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> list[Outputs]:
        """Return all responses of a decoupled model to one request. Raise as ``infer``."""
        return list(self.responses(local_request(inputs, **options)))

    def responses(self, request: LocalRequest) -> Iterator[Outputs]:
        """Yield the responses to one request as they are read. Raise as ``infer``."""
        if not self.spec.decoupled:
            yield from require_outputs(self.answers([request]))
            return
        for (one,) in self.steps([request]):
            yield from require_outputs([one])

    def answers(self, requests: Sequence[LocalRequest]) -> list[Outputs | ModelCallError | None]:
        if self.spec.max_active and not self.spec.decoupled:
            return next(self._stepped(requests))
        batch, described = worker_batch(self.spec, self._check, requests)
        if self.spec.decoupled:
            refused = no_stream(self.spec.name)
            raise ModelCallError(refused.code.value, str(refused))
        result = self._call_model(batch)
        if is_deferred(result):
            result = self._run_in_loop(lambda: await_only_result(result))
        return self._checked_answers(result, described)

    def steps(self, requests: Sequence[LocalRequest]) -> Iterator[list[Outputs | ModelCallError | None]]:
        if self.spec.max_active:
            yield from self._stepped(requests)
            return
        batch, described = worker_batch(self.spec, self._check, requests)
        for one in self._each_result(self._call_model(batch)):
            yield self._checked_answers(one, described)

    def answer_call(self, request: CallRequest) -> list[CallReply]:
        local = request_of_call(request)
        if not self.spec.decoupled:
            return call_replies(self.answers([local]), request)
        if not request.stream:
            raise ModelCallError("UNIMPLEMENTED", f"model {self.spec.name!r} is decoupled")
        return call_replies([one for (one,) in self.steps([local]) if one is not None], request)

    def _checked_answers(
        self, result: Any, requests: Sequence[WireRequest]
    ) -> list[Outputs | ModelCallError | None]:
        try:
            return list(batch_answers(self._rules.check(result, requests), requests))
        except OutputError as error:
            raise ModelCallError("INTERNAL", str(error)) from None

    def _stepped(self, requests: Sequence[LocalRequest]) -> Iterator[list[Outputs | ModelCallError | None]]:
        """Yield each step's responses of a stepped callable; if not decoupled, all answers at once."""
        pairs = [worker_batch(self.spec, self._check, [one]) for one in requests]
        described = [one for _, (one,) in pairs]
        steps = LocalSteps(
            self._loaded(), self.spec.max_active, self._run_in_loop, [one.name for one in self.spec.outputs]
        )
        answers: list[Any] = [None] * len(requests)
        for responses in steps.responses([batch.as_list()[0] for batch, _ in pairs]):
            if self.spec.decoupled:
                yield self._checked_answers(responses, described)
            answers = [old if new is None else new for old, new in zip(answers, responses, strict=True)]
        if not self.spec.decoupled:
            yield self._checked_answers(answers, described)

    def _loaded(self) -> InferenceCallable:
        if self._call is None:
            text = f"model {self.spec.name!r} is not loaded: use it in a with block, or load() it"
            raise RuntimeError(text)
        return self._call

    def _call_model(self, batch: Any) -> Any:
        call = self._loaded()
        given = batch if accepts_batch(call) else batch.as_list()
        return _outside_loop(lambda: self._context.run(call, given))

    def _each_result(self, result: Any) -> Iterator[Any]:
        """Yield all results of a call, for any kind of callable, as they are read."""
        if isinstance(result, AsyncIterator):
            try:
                while (one := self._run_in_loop(lambda: anext(result, _END))) is not _END:
                    yield one
            finally:
                if hasattr(result, "aclose"):
                    self._run_in_loop(result.aclose)
        elif isinstance(result, Iterator):
            try:
                next_result = partial(self._context.run, next, result, _END)
                while (one := _outside_loop(next_result)) is not _END:
                    yield one
            finally:
                _outside_loop(lambda: self._context.run(getattr(result, "close", bool)))
        else:
            yield self._run_in_loop(lambda: result) if asyncio.iscoroutine(result) else result

    def _run_in_loop(self, start: Callable[[], Any]) -> Any:
        async def awaiting() -> Any:
            return await start()

        return _outside_loop(lambda: self._loop.run(awaiting(), context=self._context))


def require_outputs(answers: Sequence[Outputs | ModelCallError | None]) -> list[Outputs]:
    """Return the outputs among the answers. Raise the first error."""
    for one in answers:
        if isinstance(one, ModelCallError):
            raise one
    return [one for one in answers if isinstance(one, Outputs)]


def request_of_call(call: CallRequest) -> LocalRequest:
    arrays = {name: np.asarray(value) for name, value in call.inputs.items()}
    return LocalRequest(
        arrays, call.parameters, call.requested_outputs, call.request_id, call.timeout_s, call.sequence
    )


def call_replies(answers: Sequence[Outputs | ModelCallError | None], call: CallRequest) -> list[CallReply]:
    """Return the answers to a call as its replies. The last reply is final."""
    replies = [
        CallReply(None, {}, one, True)
        if isinstance(one, ModelCallError)
        else CallReply(dict(one or {}), {} if one is None else one.parameters, None, not call.stream)
        for one in answers
    ]
    return [*replies, CallReply(None, {}, None, True)] if call.stream else replies


def _outside_loop(call: Callable[[], Result]) -> Result:
    """Return the result of a call, made in another thread if this thread runs an event loop, as in a
    notebook. A worker runs no event loop in the thread that calls a blocking callable.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


AnyLocalModel: TypeAlias = "LocalModel | LocalEnsemble"


class LocalEnsemble:
    """An ensemble in this process. The calling thread runs one step after the other, by the front's plan.
    ``find`` returns the model of a step by its name and version, "" for the newest.
    """

    def __init__(self, spec: ModelSpec, find: Callable[[str, str], AnyLocalModel]) -> None:
        self.spec = spec
        self._find = find
        self._check = model_check_for(spec)
        self._plan = plans_of(spec)

    def load(self) -> None:
        """Do nothing, because the models of the steps are loaded separately."""

    def close(self) -> None:
        """Do nothing, because an ensemble has no resources."""

    def answers(self, requests: Sequence[LocalRequest]) -> list[Outputs | ModelCallError | None]:
        return [self._answer(one) for one in requests]

    def responses(self, request: LocalRequest) -> Iterator[Outputs]:
        yield self._answer(request)

    def answer_call(self, request: CallRequest) -> list[CallReply]:
        return call_replies(self.answers([request_of_call(request)]), request)

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
        step_request = request._replace(inputs=inputs, requested_outputs=wanted)
        try:
            return require_outputs(self._find(step.model, step.version).answers([step_request]))[0]
        except WrongCall:
            raise
        except Exception as error:  # the callable of a step may raise anything
            code, text = failure_of(error)
            within = ModelCallError(code, f"in ensemble '{self.spec.name}', {text}")
            raise within from (error if error.__cause__ is None else error.__cause__)


#: Another model: a local model, or a function from inputs by name to outputs by name.
Other: TypeAlias = LocalModel | LocalEnsemble | Callable[[dict[str, Any]], Mapping[str, Any]]


class OtherModels:
    """The port through which a model calls others. Implements ``CallPort`` in the calling thread."""

    def __init__(self, others: Mapping[str, Other]) -> None:
        self._others = dict(others)
        self.calls = model_calls.OutgoingCalls()
        self.loaded = set(self._others)
        self.asked: list[model_calls.Question] = []

    def add(self, others: Mapping[str, Other]) -> None:
        """Add models. They replace models of the same names."""
        self._others |= others
        self.loaded |= others.keys()

    def ask(self, call_id: int, question: model_calls.Question) -> None:
        self.asked.append(question)
        if isinstance(question, model_calls.ModelCommand):
            replies = [self._execute_command(question)]
        else:
            # The caller may be a coroutine, and the other model may have an event loop of its own.
            with ThreadPoolExecutor(1) as thread:
                replies = thread.submit(self._replies, question).result()
        for reply in replies:
            self.calls.reply(call_id, reply)

    def cancel_call(self, call_id: int) -> None:
        """Do nothing, because every call is answered at once."""

    def return_lease(self, lease: int) -> None:
        """Do nothing, because answers are on the heap, and no shared memory is lent."""

    def wait(self, ready: Callable[[], bool]) -> None:
        assert ready(), "every call is answered at once"

    def poll(self) -> None:
        """Do nothing, because every call is answered at once, and there is no link to read."""

    def wakes(self) -> bool:
        return True

    def _execute_command(self, command: model_calls.ModelCommand) -> CallReply:
        verb, model, _ = command
        if verb == READY:
            return CallReply(None, {READY: model in self.loaded}, None, True)
        if verb == LOAD and model not in self._others:
            return _failed("INTERNAL", f"failed to load {model!r}: the test names no such other model")
        (self.loaded.add if verb == LOAD else self.loaded.discard)(model)
        return CallReply(None, {}, None, True)

    def _replies(self, request: CallRequest) -> list[CallReply]:
        other = self._others.get(request.model)
        if other is None or request.model not in self.loaded:
            known = ", ".join(sorted(self.loaded)) or "none"
            text = f"no other model {request.model!r} is loaded in this test; those are {known}"
            return [_failed("NOT_FOUND", text)]
        try:
            if not callable(other):
                return other.answer_call(request)
            inputs = {name: np.asarray(value) for name, value in request.inputs.items()}
            outputs = {name: np.asarray(value) for name, value in other(inputs).items()}
        except ModelCallError as error:
            return [CallReply(None, {}, error, True)]
        last = [CallReply(None, {}, None, True)] if request.stream else []
        return [CallReply(outputs, {}, None, not request.stream), *last]


def _failed(code: str, text: str) -> CallReply:
    return CallReply(None, {}, ModelCallError(code, text), True)
