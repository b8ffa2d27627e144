"""Tensors of ensembles that stay on a GPU: which do, who frees them, and what becomes of them when models
die.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from device_scene import ON_GPU, Gpus, ensemble, on_gpu
from ensemble_scene import LARGE, SMALL, Scene, played
from exploring import examples
from graphs import MEMBERS, ensembles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ensemble_runs import STEPS, act, step

from gpuserve.core.errors import Internal, RequestError
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol import wire

OTHER = dataclasses.replace(ON_GPU["m11"], name="other")
PAIR = ensemble(step("m11", "x", "a"), step("other", "a", "y"))
CHAIN = ensemble(step("m11", "x", "a"), step("m11", "a", "b"), step("m11", "b", "y"))


def played_on_gpus(spec: ModelSpec, *members: ModelSpec) -> contextlib.AbstractAsyncContextManager[Scene]:
    return played(spec, members=members or tuple(ON_GPU.values()), worker=Gpus().worker)


async def ask(scene: Scene, *, width: int = LARGE, times: int = 1) -> list[wire.Run]:
    """Ask, and look at the answers: what the workers ran for it, but for the first steps."""
    for worker in scene.workers.values():
        worker.heard.clear()
    for number in range(times):
        scene.submit(1, width, number)
    await scene.finish()
    scene.look()
    return [run for worker in scene.workers.values() for run in worker.heard][1:]


async def acquainted(scene: Scene) -> None:
    """Ask until the workers know what they can read of each other."""
    for _ in range(3):
        await ask(scene)


def kinds(runs: list[wire.Run]) -> set[type]:
    found = [wire.payload(tensor[3]) for run in runs for tensor in run.inputs]
    parts = [part for one in found for part in (one.parts if isinstance(one, wire.Parts) else (one,))]
    return {type(one) for one in parts}


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ensembles(), st.lists(st.tuples(STEPS, st.booleans()), max_size=25))
async def test_each_request_is_answered_and_all_memory_is_free(spec: ModelSpec, steps: list[Any]) -> None:
    async with played_on_gpus(spec) as scene:
        await acquainted(scene)
        for one, at_once in steps:
            await act(scene, one)
            if not at_once:
                await scene.settle()
        await scene.finish()


async def test_the_first_requests_go_by_the_host_and_the_others_do_not() -> None:
    async with played_on_gpus(CHAIN) as scene:
        assert kinds(await ask(scene)) == {wire.Loan}
        await acquainted(scene)
        runs = await ask(scene)
        assert kinds(runs) == {wire.DeviceLoan}
        assert all(wire.payload(run.inputs[0][3]).in_place for run in runs)  # type: ignore[union-attr]
        lent = scene.workers["m11"].lent  # type: ignore[attr-defined]
        assert len(lent) == 1


async def test_what_several_read_is_copied_by_each() -> None:
    fan = ensemble(step("m11", "x", "a"), step("m11", "a", "b"), step("m21", "a b", "y"))
    async with played_on_gpus(fan) as scene:
        await acquainted(scene)
        one, two = await ask(scene)
        in_place = [wire.payload(tensor[3]).in_place for tensor in (*one.inputs, *two.inputs)]  # type: ignore[union-attr]
        assert in_place == [False, False, True]  # a, and for the last step a and b


async def test_small_tensors_travel_in_messages() -> None:
    async with played_on_gpus(CHAIN) as scene:
        await acquainted(scene)
        assert kinds(await ask(scene, width=SMALL)) == {bytes}


async def test_an_output_of_the_ensemble_goes_to_the_host() -> None:
    async with played_on_gpus(ensemble(step("m11", "x", "a"), step("m11", "a", "y"), outputs="a y")) as scene:
        await acquainted(scene)
        assert kinds(await ask(scene)) == {wire.Loan}


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"memory": "cpu"}, {"response_cache": True}], ids=str)
async def test_what_not_all_can_read_goes_by_the_host(change: dict[str, Any]) -> None:
    other = dataclasses.replace(on_gpu(MEMBERS["m11"], **change), name="other")
    async with played_on_gpus(PAIR, ON_GPU["m11"], other) as scene:
        await acquainted(scene)
        assert kinds(await ask(scene)) == {wire.Loan}


async def test_what_a_cpu_made_goes_by_the_host() -> None:
    made = dataclasses.replace(on_gpu(MEMBERS["m11"], device="cpu"), name="made")
    async with played_on_gpus(
        ensemble(step("made", "x", "a"), step("m11", "a", "y")), made, ON_GPU["m11"]
    ) as scene:
        await acquainted(scene)
        assert kinds(await ask(scene)) == {wire.Loan}
        assert not any(one.kept for run in scene.workers["made"].heard for one in wire.requests(run.requests))


async def test_what_cannot_be_opened_goes_by_the_host() -> None:
    gpus = Gpus()
    gpus.out_of_reach = True
    async with played(CHAIN, members=tuple(ON_GPU.values()), worker=gpus.worker) as scene:
        await acquainted(scene)
        assert kinds(await ask(scene)) == {wire.Loan}


async def test_a_new_worker_is_asked_first() -> None:
    async with played_on_gpus(CHAIN) as scene:
        await acquainted(scene)
        await act(scene, ("die", 0))
        await scene.settle()
        assert kinds(await ask(scene)) == {wire.Loan}
        await acquainted(scene)
        assert kinds(await ask(scene)) == {wire.DeviceLoan}


async def test_a_tensor_outlives_the_worker_that_made_it() -> None:
    async with played_on_gpus(PAIR, ON_GPU["m11"], OTHER) as scene:
        await acquainted(scene)
        scene.submit(1, LARGE, 5)
        await scene.settle()
        scene.workers["m11"].answer(well=True)
        await scene.settle()
        (run,) = scene.workers["other"].runs
        assert kinds([run]) == {wire.DeviceLoan}
        await act(scene, ("die", 0))
        await scene.settle()
        await scene.finish()
        scene.look()
        assert scene.answered == 4


@pytest.mark.parametrize("shared", [True, False])
async def test_a_reader_that_dies_is_asked_again_where_it_had_a_copy(shared: bool) -> None:
    last = step("m21", "a b", "y") if shared else step("m21", "b b", "y")
    spec = ensemble(step("m11", "x", "a"), step("other", "a", "b"), last)
    async with played_on_gpus(spec, *ON_GPU.values(), OTHER) as scene:
        await acquainted(scene)
        pending = scene.submit(1, LARGE, 5)
        await scene.settle()
        scene.workers["m11"].answer(well=True)
        await scene.settle()
        assert kinds(scene.workers["other"].runs) == {wire.DeviceLoan}
        scene.drivers["other"].workers.instance_down("a", "it died", 1.0)
        scene.workers["other"].die()
        scene.workers["other"] = scene.new_worker(scene.drivers["other"])
        await scene.finish()
        assert (pending.answer.exception() is None) is shared


async def test_a_reader_that_was_exchanged_meanwhile_is_not_given_what_it_cannot_read() -> None:
    async with played_on_gpus(PAIR, ON_GPU["m11"], OTHER) as scene:
        await acquainted(scene)
        pending = scene.submit(1, LARGE, 5)
        await scene.settle()
        scene.drivers["other"].workers.device_inputs.everywhere = frozenset()
        scene.workers["m11"].answer(well=True)
        await scene.settle()
        error = pending.answer.exception()
        assert isinstance(error, RequestError)
        assert "was exchanged while a request for it was under way" in str(error)


async def test_a_worker_keeps_nothing_that_nobody_asked_for() -> None:
    async with played_on_gpus(CHAIN) as scene:
        await acquainted(scene)
        pending = scene.submit(1, LARGE, 5)
        worker: Any = scene.workers["m11"]
        for _ in range(len(CHAIN.steps) - 1):
            await scene.settle()
            worker.answer(well=True)
        await scene.settle()
        (request,) = wire.requests(worker.runs[0].requests)
        worker.runs[0] = worker.runs[0]._replace(requests=(request._replace(kept=("o0",)),))
        worker.answer(well=True)
        await scene.settle()
        assert isinstance(pending.answer.exception(), Internal)
        scene.look()
        for segment, offset in list(worker.pool._lent):  # nonsense is not given back
            worker.pool.free([(segment, offset)])


@pytest.mark.parametrize("place", [(9, 0, 4), (0, -4, 4), (0, 0, 1 << 40), (0, 0, 8)], ids=str)
async def test_places_of_exports_are_not_believed(place: tuple[int, int, int]) -> None:
    async with played_on_gpus(CHAIN) as scene:
        await acquainted(scene)
        driver = scene.drivers["m11"]
        (link,) = driver.workers.instances.up.values()
        with pytest.raises(ValueError, match=r"export segment|bytes of FP32"):
            link.exports.kept_tensor("o0", "FP32", (1,), wire.Exported(*place))
        with pytest.raises(ValueError, match="too small"):
            link.exports.kept_tensor("o0", "FP32", (1,), wire.Exported(0, 0, 4))
        with pytest.raises(ValueError, match="export segment"):
            link.exports.receive(wire.ExportSegment(0, 1 << 20, b"h" * 64))
        with pytest.raises(KeyError):
            link.exports.receive(wire.ExportOpened(77, ""))
