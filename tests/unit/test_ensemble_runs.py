"""Requests of ensembles between drivers and workers: what is sent and freed, and that each counts once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from ensemble_scene import LARGE, SMALL, Scene, played
from exploring import examples
from graphs import MEMBERS, ensembles, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuserve.core.errors import RequestError, Unavailable, Unimplemented
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.model.spec import ModelSpec, StepSpec
from gpuserve_worker.protocol import wire

STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 2), st.sampled_from([SMALL, LARGE]), st.integers(0, 9)),
    st.tuples(st.just("submit"), st.integers(1, 2), st.sampled_from([SMALL, LARGE]), st.integers(0, 9)),
    st.tuples(st.just("answer"), st.integers(0, 3), st.sampled_from([True, True, True, False])),
    st.tuples(st.just("answer"), st.integers(0, 3), st.just(True)),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("look")),
)


async def act(scene: Scene, one: tuple[Any, ...]) -> None:
    names = sorted(scene.workers)
    match one:
        case ("submit", rows, width, value):
            scene.submit(rows, width, value)
        case ("answer", number, well):
            if (worker := scene.workers[names[number]]).runs:
                worker.answer(well=well)
        case ("die", number):
            name = names[number]
            scene.workers[name].die()
            await scene.settle()
            scene.workers[name] = scene.new_worker(scene.drivers[name])
        case ("cancel", number):
            scene.cancel(number)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ensembles(), st.lists(st.tuples(STEPS, st.booleans()), max_size=25))
async def test_each_request_is_answered_and_all_memory_is_free(spec: ModelSpec, steps: list[Any]) -> None:
    async with played(spec) as scene:
        for one, at_once in steps:
            await act(scene, one)
            if not at_once:
                await scene.settle()
        await scene.finish()


@settings(max_examples=examples(100), deadline=None)
@given(ensembles(), st.sampled_from([SMALL, LARGE]), st.data())
async def test_the_outputs_asked_for_are_right(spec: ModelSpec, width: int, data: st.DataObject) -> None:
    names = [one.name for one in spec.outputs]
    outputs = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
    async with played(spec) as scene:
        for number in range(3):
            scene.submit(1, width, number, outputs)
        await scene.finish()
        scene.look()
        assert scene.answered == 3


@settings(max_examples=examples(100), deadline=None)
@given(ensembles(), st.lists(STEPS, max_size=12))
async def test_all_is_free_when_the_front_closes_in_the_middle(spec: ModelSpec, steps: list[Any]) -> None:
    scene = Scene(spec)
    await scene.settle()
    for one in steps:
        await act(scene, one)
        await scene.settle()
    asked = [pending for pending, *_ in scene.asked]
    scene.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for pending in asked:
        assert pending.answer.done()
        if pending.answer.exception() is None:
            pending.answer.result().close()


# ---- what is sent ---------------------------------------------------------------------------


def step(model: str, reads: str, writes: str) -> StepSpec:
    inputs = tuple((f"i{n}", name) for n, name in enumerate(reads.split()))
    return StepSpec(model, 0, inputs, tuple((f"o{n}", name) for n, name in enumerate(writes.split())))


def ensemble(*steps: StepSpec, outputs: str = "y") -> ModelSpec:
    return ModelSpec("e", tensors(["x"]), tensors(outputs.split()), 4, (), steps=steps)


def payloads(run: wire.Run) -> list[wire.Payload]:
    return [one.payload for one in wire.tensors(run.inputs)]


def sources(run: wire.Run) -> list[wire.Payload]:
    return [wire.payload(wire.Fill(*one).source) for one in run.fills]


async def test_a_large_tensor_for_one_reader_is_lent_where_it_lies() -> None:
    """Neither the request's own body nor what a step made is in any arena but the one it came to lie in."""
    async with played(ensemble(step("m11", "x", "a"), step("m11", "a", "y"))) as scene:
        scene.submit(1, LARGE, 3)
        await scene.finish()
        first, second = scene.workers["m11"].heard
        for run in (first, second):
            assert [type(one) for one in payloads(run)] == [wire.Loan]
            assert run.fills == ()
        assert [driver.arena.statistics().allocated for driver in scene.drivers.values()] == [0, 0, 0, 0, 1]


async def test_a_large_tensor_for_several_readers_is_copied_by_their_workers() -> None:
    # m21 reads a, which is the client's as well, and b, which nobody else reads.
    spec = ensemble(step("m11", "x", "b"), step("m11", "x", "a"), step("m21", "b a", "y"), outputs="y a")
    async with played(spec) as scene:
        scene.submit(1, LARGE, 3)
        await scene.finish()
        (last,) = scene.workers["m21"].heard
        assert [type(one) for one in payloads(last)] == [wire.Loan, wire.Ref]
        assert [type(one) for one in sources(last)] == [wire.Loan]


async def test_merged_large_tensors_are_put_together_by_the_worker() -> None:
    async with played(ensemble(step("m11", "x", "a"), step("m12", "a", "y"))) as scene:
        for number in range(3):
            scene.submit(1, LARGE, number)
        await scene.finish()
        last = scene.workers["m12"].heard[-1]
        assert len(last.requests) == 3
        assert [type(one) for one in payloads(last)] == [wire.Ref]
        assert [type(one) for one in sources(last)] == [wire.Loan] * 3


async def test_a_callable_that_never_writes_reads_what_is_shared_where_it_lies() -> None:
    calm = dataclasses.replace(MEMBERS["m21"], name="calm", read_only_inputs=True)
    spec = ensemble(step("m11", "x", "a"), step("calm", "a a", "y"))
    async with played(spec, members=[*MEMBERS.values(), calm]) as scene:
        scene.submit(1, LARGE, 3)
        for _ in range(2):
            await scene.settle()
            for worker in scene.workers.values():
                if worker.runs and worker is not scene.workers["calm"]:
                    worker.answer(well=True)
        await scene.settle()
        (run,) = scene.workers["calm"].heard
        assert [type(one) for one in payloads(run)] == [wire.Loan, wire.Loan]
        assert run.fills == ()
        scene.workers["calm"].answer(well=False)  # it may not write, as the others here do
        await scene.finish()


async def test_small_tensors_are_in_the_message() -> None:
    async with played(ensemble(step("m11", "x", "a"), step("m11", "a", "y"))) as scene:
        scene.submit(1, SMALL, 3)
        await scene.finish()
        assert all(isinstance(one, bytes) for run in scene.workers["m11"].heard for one in payloads(run))


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind", "told"),
    [
        (ensemble(step("m11", "x", "a"), step("gone", "a", "y")), Unavailable, "no gone"),
        (
            ensemble(step("stream", "x", "y")),
            Unimplemented,
            "model 'stream' is decoupled, and a step needs one response to each request",
        ),
    ],
    ids=["absent", "decoupled"],
)
async def test_an_unusable_model_fails_its_step(spec: ModelSpec, kind: type[RequestError], told: str) -> None:
    stream = dataclasses.replace(MEMBERS["m11"], name="stream", decoupled=True)
    texts: list[str] = []
    async with played(spec, members=[*MEMBERS.values(), stream]) as scene:
        for width in (SMALL, LARGE):
            pending = scene.submit(1, width, 1)
            await scene.finish()
            assert type(pending.answer.exception()) is kind
            texts.append(str(pending.answer.exception()))
    assert texts == [f"in ensemble 'e', {told}"] * 2


async def test_an_ensemble_that_leads_back_to_itself_ends() -> None:
    spec = dataclasses.replace(ensemble(StepSpec("e", 0, (("x", "x"),), (("y", "y"),))))
    async with played(spec) as scene:
        assert not scene.ensemble.ready
        pending = scene.submit(1, SMALL, 1)
        while not pending.answer.done():
            await scene.settle()
        assert "more than 16 ensembles within one another" in str(pending.answer.exception())
        # Each of them counts itself.
        scene.submitted, scene.failed = 17, 16


@pytest.mark.parametrize("width", [SMALL, LARGE])
async def test_a_request_under_way_is_finished_after_the_others_are_refused(width: int) -> None:
    async with played(ensemble(step("m11", "x", "a"), step("m11", "a", "y"))) as scene:
        scene.submit(1, width, 1)
        await scene.settle()
        for driver in scene.drivers.values():
            driver.stop_accepting()
        with pytest.raises(Unavailable, match="Server is stopping"):
            scene.submit(1, width, 1)
        scene.metrics.statistics.failures[FailureReason.REJECTED] = 0
        await scene.finish()
        scene.look()
        assert scene.answered == 1
