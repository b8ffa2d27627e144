"""Callables that await or yield, in a real worker process. The test is its supervisor and its front."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import wait_until
from worker_process import WorkerProcess, loaded, model

from gpuserve_worker.protocol import wire

ANY = {"inputs": (("x", "INT32", (-1,), False),), "outputs": (("y", "INT32", (-1,), False),)}


def stream_model(name: str, **changes: Any) -> wire.Init:
    return model(f"streams.py:{name}", decoupled=True, **ANY, **changes)


def unary_model(name: str, **changes: Any) -> wire.Init:
    return model(f"streams.py:{name}", **ANY, **changes)


def number(*values: int) -> list[wire.WireTensor]:
    array = np.array(values, np.int32)[:, None]
    return [wire.WireTensor("x", "INT32", array.shape, array.tobytes())]


def responses(worker: WorkerProcess, batch_id: int = 1) -> Iterator[list[Any]]:
    """What each Yield of a batch holds for its requests, until the batch ends; its end is ``worker.end``."""
    while isinstance(message := worker.hear(worker.link), wire.Yield):
        assert message.batch_id == batch_id
        worker.link.send(wire.Credit(((batch_id, 1),)))
        yield [_shown(worker, one) for one in wire.responses(message.responses or ())]
    worker.end = message  # type: ignore[attr-defined]


def _shown(worker: WorkerProcess, response: Any) -> Any:
    if response is None or isinstance(response, wire.WireFailure):
        return response
    (tensor,) = response
    return int(np.frombuffer(worker.read(tensor.payload), np.int32)[0])


@pytest.fixture
def closed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "closed"
    monkeypatch.setenv("CLOSED_AT", str(path))
    return path


def test_the_requests_of_a_batch_may_get_different_numbers_of_responses() -> None:
    with loaded(stream_model("each_to_its_own")) as worker:
        worker.start(number(1, 3), rows=(1, 1))
        assert list(responses(worker)) == [[0, 0], [None, 1], [None, 2]]


def test_an_error_may_be_for_one_request_with_a_code_of_its_own() -> None:
    with loaded(stream_model("fails_for_one")) as worker:
        worker.start(number(1, 1), rows=(1, 1))
        refused = wire.WireFailure("INVALID_ARGUMENT", "not you")
        assert list(responses(worker)) == [[0, 0], [refused, 1], [None, 2]]


@pytest.mark.parametrize(
    ("name", "text"),
    [("returns", "with `yield` in place of `return`"), ("yields_nonsense", "must return a list")],
)
def test_what_is_no_response_is_refused(name: str, text: str) -> None:
    with loaded(stream_model(name)) as worker:
        worker.start(number(1))
        list(responses(worker))
        assert text in wire.WireFailure(*worker.end.failure).text  # type: ignore[attr-defined]


def test_a_worker_waits_for_credit() -> None:
    with loaded(stream_model("endless")) as worker:
        for batch_id in (1, 2):  # the second is not held up by the first
            worker.start(number(1), batch_id=batch_id)
            for yields in (1, wire.YIELD_WINDOW - 1):
                for _ in range(yields):
                    message = worker.hear(worker.link)
                    assert isinstance(message, wire.Yield)
                    assert message.batch_id == batch_id
                worker.start(number(1), batch_id=10 + batch_id + yields)
                other = worker.hear(worker.link)  # nothing more came of this one
                assert isinstance(other, wire.Yield)
                assert other.batch_id == 10 + batch_id + yields
                if yields == 1:
                    worker.link.send(wire.Credit(((batch_id, wire.YIELD_WINDOW - 1),)))
        worker.link.send(wire.Credit(((1, 2),)))
        got = [worker.hear(worker.link) for _ in range(2)]
        assert [one.batch_id for one in got if isinstance(one, wire.Yield)] == [1, 1]


@pytest.mark.parametrize("name", ["endless", "waits_for_ever"])
def test_a_cancelled_stream_is_closed(name: str, closed_at: Path) -> None:
    with loaded(stream_model(name)) as worker:
        worker.start(number(1, 1), rows=(1, 1))
        assert isinstance(worker.hear(worker.link), wire.Yield)
        worker.link.send(wire.Cancel(1, 0))
        worker.link.send(wire.Credit(((1, 1),)))
        worker.link.send(wire.Cancel(1, 1))
        while isinstance(message := worker.hear(worker.link), wire.Yield):
            pass
        assert isinstance(message, wire.Failed)
        assert wire.WireFailure(*message.failure).code == "CANCELLED"
        assert message.inputs_free
        assert closed_at.exists()


def test_coroutines_overlap_up_to_the_number_that_the_worker_says() -> None:
    with WorkerProcess(unary_model("Meeting", concurrency=4)) as worker:
        while not isinstance(ready := worker.hear(worker.boot), wire.Ready):
            pass
        assert ready.slots == 4
        worker.attach(1)
        for batch_id in range(4):
            worker.start(number(1), batch_id=batch_id)
        answered = {worker.answer().batch_id for _ in range(4)}
        assert answered == {0, 1, 2, 3}


@pytest.mark.parametrize(("name", "slots"), [("plain", 1), ("count", 16), ("awaited", 16)])
def test_the_kind_of_the_callable_says_how_many_at_once(name: str, slots: int) -> None:
    with WorkerProcess(stream_model(name)) as worker:
        while not isinstance(ready := worker.hear(worker.boot), wire.Ready):
            pass
        assert ready.slots == slots


def test_a_plain_function_may_return_what_has_to_be_awaited() -> None:
    with loaded(unary_model("returns_a_coroutine")) as worker:
        assert isinstance(worker.run(number(1)), wire.Done)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "returns_two",
            "more than one response; expected exactly one response, or a model that is decoupled",
        ),
        ("forgets_to_await", "must be an array, but the callable returned coroutine, which was not awaited"),
    ],
)
def test_what_is_not_one_response_is_refused_where_one_is_due(name: str, text: str) -> None:
    with loaded(unary_model(name)) as worker:
        assert text in wire.WireFailure(*worker.run(number(1)).failure).text


def test_another_front_finds_nothing_of_the_streams_of_the_first(closed_at: Path) -> None:
    with loaded(stream_model("endless")) as worker:
        worker.start(number(1))
        assert isinstance(worker.hear(worker.link), wire.Yield)
        worker.new_front(2)
        wait_until(closed_at.exists, "the stream of the first front is closed")
        worker.start(number(1))
        message = worker.hear(worker.link)
        assert isinstance(message, wire.Yield)
        assert [_shown(worker, one) for one in wire.responses(message.responses or ())] == [0]


def test_stop_ends_a_stream_that_never_would() -> None:
    with loaded(stream_model("endless")) as worker:
        worker.start(number(1))
        assert isinstance(worker.hear(worker.link), wire.Yield)
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0


def test_stop_lets_a_coroutine_finish(tmp_path: Path) -> None:
    with loaded(unary_model("Meeting", kwargs={"expected": 1})) as worker:
        worker.start(number(1))
        assert isinstance(worker.answer(), wire.Done)
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0


def test_the_supervisor_hears_that_nothing_can_be_done_any_more() -> None:
    with loaded(unary_model("broken_for_good")) as worker:
        assert worker.run(number(1)).failure == ("INTERNAL", "no further inferences possible")
        worker.log_record()
        assert worker.hear(worker.boot) == wire.Unrecoverable("no further inferences possible")


WARMUP = (("first", 3, 2, (("x", "INT32", (2,), "zero", ""),)),)


def test_a_coroutine_is_warmed_up_before_the_worker_is_ready() -> None:
    with loaded(unary_model("Warmed", warmup=WARMUP)) as worker:
        done = worker.run(number(1))
        (tensor,) = wire.tensors(done.outputs)
        assert np.frombuffer(worker.read(tensor.payload), np.int32).tolist() == [3, 3]


def test_a_generator_is_run_by_the_warm_up_to_its_end() -> None:
    with loaded(stream_model("WarmedStream", warmup=WARMUP)) as worker:
        worker.start(number(1))
        assert list(responses(worker)) == [[3], [3]]


def test_an_endless_generator_is_warmed_up_as_well(closed_at: Path) -> None:
    with loaded(stream_model("endless", warmup=WARMUP)):
        assert closed_at.exists()


def test_a_warm_up_that_fails_is_logged_and_the_model_is_served() -> None:
    with WorkerProcess(unary_model("broken_for_good", warmup=WARMUP)) as worker:
        logged = []
        while not isinstance(message := worker.hear(worker.boot), wire.Ready):
            logged.append(message)
        (record,) = [one for one in logged if isinstance(one, wire.Log)]
        assert record.level == 30
        assert "warm-up 'first' of model 'tested' failed" in record.text
        worker.attach(1)
        assert isinstance(worker.run(number(1)), wire.Failed)


def test_a_request_that_failed_needs_no_more_of_its_generator(closed_at: Path) -> None:
    with loaded(stream_model("fails_and_goes_on")) as worker:
        worker.start(number(1))
        (first,) = next(responses(worker))
        assert first == wire.WireFailure("INTERNAL", "not this one")
        list(responses(worker))
        assert isinstance(worker.end, wire.Failed)  # type: ignore[attr-defined]
        assert closed_at.exists()


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_generator_that_swallows_its_cancellation_ends_all_the_same(how: str, closed_at: Path) -> None:
    with loaded(stream_model("swallows_cancellation")) as worker:
        worker.start(number(1))
        assert isinstance(worker.hear(worker.link), wire.Yield)
        if how == "cancel":
            worker.link.send(wire.Cancel(1, 0))
            assert not isinstance(worker.hear(worker.link), wire.Yield)
        else:
            worker.boot.send(wire.Stop())
            assert worker.exit_status() == 0
        assert closed_at.exists()


def test_stop_does_not_wait_for_a_coroutine_that_sleeps() -> None:
    with loaded(unary_model("sleeps")) as worker:
        worker.start(number(1))
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0


@pytest.mark.parametrize("name", ["raises_generator_exit", "raises_generator_exit_async"])
def test_what_is_no_exception_is_a_failure_too(name: str) -> None:
    with loaded(unary_model(name)) as worker:
        for _ in range(2):
            assert wire.WireFailure(*worker.run(number(1)).failure).text == "out of place"
            worker.log_record()
