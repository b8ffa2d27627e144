"""The life of a generation, the order of operations, and what the index says. No process runs here."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import GpuserveError, Internal
from gpuserve.core.states import IllegalTransition
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.models.declared_models import DeclaredModels, loaded_at_start
from gpuserve.supervisor.models.generations import Generation, GenerationState, RepositoryIndex
from gpuserve.supervisor.models.model_operations import (
    LoadOperation,
    OperationQueues,
    UnloadOperation,
    failed_start,
    refused_load,
)
from gpuserve.supervisor.processes.lifecycle import LiveSettings
from gpuserve.supervisor.workers.worker_group import WorkerGroup
from gpuserve.supervisor.workers.worker_monitor import WorkerContext

SPEC = ModelSpec("m", (), (), 0, (InstanceSpec("cpu#0", "cpu", {}),))


@pytest.fixture
def reactor() -> Any:
    one = Reactor()
    yield one
    one.close()


def generation(reactor: Reactor, version: int = 1, *states: GenerationState) -> Generation:
    spec = dataclasses.replace(SPEC, version=version)
    settings = LiveSettings(ServerSettings())
    care = WorkerContext(reactor, None, lambda _: 1, settings, False, {})  # type: ignore[arg-type]
    one = Generation(version, spec, WorkerGroup(spec, care), served=False)
    for state in states:
        one.move(state)
    return one


STATE = GenerationState
LIFE = (STATE.READY, STATE.RETIRING, STATE.STOPPING, STATE.GONE)
LEGAL = set(itertools.pairwise((STATE.LOADING, *LIFE)))


@given(st.lists(st.sampled_from(GenerationState), max_size=8))
@example([*LIFE])
def test_only_the_steps_of_the_table_are_taken(states: list[GenerationState]) -> None:
    reactor = Reactor()
    one = generation(reactor)
    assert one.state is STATE.LOADING
    for state in states:
        before = one.state
        if (before, state) in LEGAL:
            one.move(state)
            assert one.state is state
        else:
            with pytest.raises(IllegalTransition, match=f"is {before.name} and cannot become {state.name}"):
                one.move(state)
            assert one.state is before
    reactor.close()


def test_a_new_front_is_told_of_what_can_serve(reactor: Reactor) -> None:
    told = [generation(reactor, 1, *LIFE[:count]).is_known_to_front for count in range(5)]
    assert told == [True, True, False, False, False]


class Log:
    """Who asked, in the order of their answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, GpuserveError | None]] = []

    def load(self, name: str, model: str = "m") -> LoadOperation:
        return LoadOperation(model, self._answer(name), lambda: [SPEC], refused_load, replaces=True)

    def unload(self, name: str, model: str = "m") -> UnloadOperation:
        return UnloadOperation(model, self._answer(name))

    def _answer(self, name: str) -> Any:
        return lambda error: self.answers.append((name, error))


def test_operations_on_one_model_wait_for_one_another() -> None:
    log, operations = Log(), OperationQueues()
    first, second, other = log.load("first"), log.unload("second"), log.load("other", "n")
    assert [operations.put(one) for one in (first, second, other)] == [True, False, True]
    assert operations.running("m") is first
    failure = Internal("no")
    assert operations.finish(first, failure) is second
    with pytest.raises(AssertionError, match="answered once"):
        operations.finish(first)
    assert operations.finish(second) is None
    assert log.answers == [("first", failure), ("second", None)]
    assert (operations.running("m"), operations.running("n")) == (None, other)


def test_whoever_is_answered_may_ask_for_more_at_once() -> None:
    operations = OperationQueues()
    more = UnloadOperation("m", lambda error: None)
    begun: list[bool] = []
    first = UnloadOperation("m", lambda error: begun.append(operations.put(more)))
    operations.put(first)
    assert operations.finish(first) is None  # who put it has begun it
    assert (begun, operations.running("m")) == ([True], more)


def test_a_generation_is_of_the_load_at_work(reactor: Reactor) -> None:
    log, operations, one = Log(), OperationQueues(), generation(reactor)
    load = log.load("load")
    assert operations.load_of(one) is None
    operations.put(load)
    load.generations = [one]
    assert operations.load_of(one) is load
    assert operations.load_of(generation(reactor)) is None


def test_all_that_waits_is_given_up_at_once() -> None:
    log, operations = Log(), OperationQueues()
    given = [log.load("a"), log.unload("b"), log.load("c", "n")]
    for one in given:
        operations.put(one)
    assert list(operations.pop_all()) == given
    assert (operations.running("m"), list(operations.pop_all())) == (None, [])


def test_what_clients_and_programs_are_told_of_a_failure() -> None:
    refused = "load failed for model 'm': version 1 is at UNAVAILABLE state: no weights;\n"
    assert str(refused_load(SPEC, "cpu#0", "no weights")) == refused
    failed = "model 'm': instance cpu#0 could not be started: no weights"
    assert str(failed_start(SPEC, "cpu#0", "no weights")) == failed


def test_the_index_of_a_model(reactor: Reactor) -> None:
    index = RepositoryIndex(DeclaredModels([SPEC]))
    assert index.states("m", []) == ((0, "", ""),)
    index.unavailable("absent", 1, "no weights")
    assert index.states("absent", []) == (), "it cannot be loaded again"
    index.unavailable("m", 1, "no weights")
    assert index.states("m", []) == [(1, "UNAVAILABLE", "no weights")]
    loading = generation(reactor, 1)
    assert index.states("m", [loading]) == [(1, "LOADING", "")]
    ready, retiring = generation(reactor, 1, *LIFE[:1]), generation(reactor, 2, *LIFE[:2])
    assert index.states("m", [retiring, loading, ready]) == [(1, "READY", ""), (2, "UNLOADING", "")]
    index.forget("m", 1)
    assert index.states("m", []) == ((0, "", ""),)


def test_declared_models() -> None:
    declared = DeclaredModels([SPEC])
    second = dataclasses.replace(SPEC, version=2)
    declared.add(second)
    assert (declared.names(), declared.read("m"), declared.read("n")) == (["m"], [SPEC, second], [])
    assert loaded_at_start([SPEC], None) == [SPEC]
    assert loaded_at_start([SPEC], ("n",)) == []
