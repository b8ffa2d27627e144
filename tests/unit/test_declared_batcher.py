"""``ModelConfig`` with queues, priorities and warm-ups becomes a ``ModelSpec``, or one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve.api.binding import check_new, model_spec
from gpuserve.core.errors import BadModelConfig, BindError, DuplicateModel
from gpuserve.model.declaration import (
    DynamicBatcher,
    ModelConfig,
    ModelWarmup,
    QueuePolicy,
    Tensor,
    TimeoutAction,
    WarmupInput,
)
from gpuserve.model.spec import BatchingSpec, ModelSpec, PolicySpec, QueueSpec, SequenceBatching

X = Tensor((-1, 3), np.float32, "x")
Y = Tensor((1,), bytes, "y", optional=True)
ZEROS = WarmupInput(np.float32, (2, 3), zero_data=True)


def infer(requests: Any) -> Any:
    return requests


def stream(requests: Any) -> Any:
    yield requests


async def astream(requests: Any) -> Any:
    yield requests


class Streaming:
    def __call__(self, requests: Any) -> Any:
        yield requests


def spec(
    config: Any = None,
    infer_func: Any = infer,
    inputs: Any = (X, Y),
    name: str = "m",
    version: int = 1,
    strict: bool | str = False,
    **more: Any,
) -> ModelSpec:
    return model_spec(name, infer_func, inputs, [X], version, config, strict, "thread", **more)


def complaint(config: Any = None, **more: Any) -> str:
    with pytest.raises(BindError) as error:
        spec(config, **more)
    return str(error.value)


def batched(**batcher: Any) -> ModelConfig:
    return ModelConfig(batcher=DynamicBatcher(**batcher))


def warmed(*warmups: Any, **config: Any) -> ModelConfig:
    return ModelConfig(model_warmup=list(warmups), **config)


# ---- how requests wait --------------------------------------------------------------------------


def test_priorities_and_policies() -> None:
    delay = QueuePolicy(TimeoutAction.DELAY, 500, True, 8)
    made = spec(
        batched(
            priority_levels=3,
            default_priority_level=2,
            default_queue_policy=QueuePolicy(default_timeout_microseconds=7),
            priority_queue_policy={3: delay, 1: QueuePolicy(max_queue_size=2)},
        )
    )
    assert made.queue == QueueSpec(
        priority_levels=3,
        default_priority=2,
        policy=PolicySpec(default_timeout_us=7),
        policies=((1, PolicySpec(max_requests=2)), (3, PolicySpec("delay", 500, True, 8))),
    )
    assert ModelSpec.from_wire(made.to_wire()).queue == made.queue


def test_fairness_and_its_header() -> None:
    made = spec(ModelConfig(queue=QueueSpec(fairness="client", fairness_header="X-Tenant")))
    assert (made.queue.fairness, made.queue.fairness_header) == ("client", "x-tenant")
    assert ModelSpec.from_wire(made.to_wire()).queue == made.queue


@pytest.mark.parametrize(
    ("queue", "text"),
    [
        ({"fairness": "address"}, "queue.fairness must be one of 'none' or 'client', got 'address'"),
        ({"fairness": "client", "fairness_header": "x tenant"}, "expected the name of a header"),
        ({"fairness_header": "x-tenant"}, "fairness_header has no effect without fairness: client"),
    ],
)
def test_fairness_that_cannot_be(queue: dict[str, str], text: str) -> None:
    assert text in complaint(ModelConfig(queue=QueueSpec(**queue)))


def test_fairness_goes_with_one_queue_and_no_order_of_answers() -> None:
    fair = QueueSpec(fairness="client")
    ordered = BatchingSpec(preserve_ordering=True)
    both = ModelConfig(batching=ordered, queue=fair)
    assert "preserve_ordering does not go with fairness" in complaint(both)
    in_sequences = ModelConfig(sequence_batching=SequenceBatching(), queue=fair)
    assert "fairness does not go with sequence batching" in complaint(in_sequences)


def test_ordering_is_preserved_where_asked_for() -> None:
    assert spec(batched(preserve_ordering=True)).batching.preserve_ordering
    assert not spec().batching.preserve_ordering


def test_a_model_without_a_batcher_has_no_priorities() -> None:
    assert spec(ModelConfig(batching=False, batcher=DynamicBatcher(priority_levels=2))).queue == QueueSpec()
    assert spec(ModelConfig(batcher=None)).queue == QueueSpec()


@pytest.mark.parametrize(
    ("batcher", "text"),
    [
        ({"priority_levels": 3}, "The `default_priority_level` must be between 1 and 3. Got 0."),
        (
            {"priority_levels": 3, "default_priority_level": 4},
            "The `default_priority_level` must be between 1 and 3. Got 4.",
        ),
        ({"default_priority_level": 1}, "Provide the `priority_levels` for a `default_priority_level`"),
        ({"priority_levels": -1}, "must be an integer from 0 to 18446744073709551615, got -1"),
        (
            {"priority_levels": 1 << 64},
            "must be an integer from 0 to 18446744073709551615, got 18446744073709551616",
        ),
        ({"priority_levels": "2"}, "must be an integer from 0 to 18446744073709551615, got '2'"),
        (
            {"priority_queue_policy": {1: QueuePolicy()}},
            "Provide the `priority_levels` if you want to define `priority_queue_policy` for",
        ),
        (
            {"priority_levels": 5, "default_priority_level": 1, "priority_queue_policy": {6: QueuePolicy()}},
            "Invalid `priority`=6 provided. The value must be between 1 and 5.",
        ),
        (
            {
                "priority_levels": 5,
                "default_priority_level": 1,
                "priority_queue_policy": {"1": QueuePolicy()},
            },
            "the keys of priority_queue_policy must be integers of at least 1, got '1'",
        ),
        (
            {"priority_levels": 5, "default_priority_level": 1, "priority_queue_policy": {1: {}}},
            "priority_queue_policy[1] must be a QueuePolicy, got an object of type dict",
        ),
        ({"priority_queue_policy": [1]}, "priority_queue_policy must be a mapping, got [1]"),
        ({"default_queue_policy": "reject"}, "must be a QueuePolicy, got an object of type str"),
        (
            {"default_queue_policy": QueuePolicy(timeout_action="DROP")},  # type: ignore[arg-type]
            "default_queue_policy.timeout_action must be one of 'reject' or 'delay', got 'DROP'",
        ),
        (
            {"default_queue_policy": QueuePolicy(default_timeout_microseconds=-1)},
            "default_queue_policy.default_timeout_microseconds must be an integer of at least 0, got -1",
        ),
        (
            {"default_queue_policy": QueuePolicy(allow_timeout_override=1)},  # type: ignore[arg-type]
            "default_queue_policy.allow_timeout_override must be true or false, got 1",
        ),
        (
            {"default_queue_policy": QueuePolicy(max_queue_size=1.5)},  # type: ignore[arg-type]
            "default_queue_policy.max_queue_size must be an integer of at least 0, got 1.5",
        ),
        ({"preserve_ordering": "yes"}, "preserve_ordering must be true or false, got 'yes'"),
        (
            {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
            "preserve_ordering goes with one level of priority, given 2",
        ),
        (
            {"preserve_ordering": True, "default_queue_policy": QueuePolicy(TimeoutAction.DELAY, 5)},
            "preserve_ordering does not go with delay; expected 'reject'",
        ),
    ],
)
def test_queues_that_cannot_be(batcher: dict[str, Any], text: str) -> None:
    with pytest.raises(BadModelConfig, match=re.escape(text)):
        spec(batched(**batcher))


# ---- how it answers -----------------------------------------------------------------------------


def test_a_decoupled_model_is_not_retried() -> None:
    made = spec(ModelConfig(decoupled=True), infer_func=[stream, astream, Streaming(), infer])
    assert (made.decoupled, made.retry_on_worker_death) == (True, False)
    assert spec().retry_on_worker_death


def test_a_response_cache() -> None:
    assert spec(ModelConfig(response_cache=True)).response_cache
    both = ModelConfig(response_cache=True, decoupled=True)
    assert "response_cache does not go with decoupled" in complaint(both)


@pytest.mark.parametrize("infer_func", [stream, astream, Streaming(), [infer, stream]])
def test_a_generator_needs_a_decoupled_model(infer_func: Any) -> None:
    text = complaint(infer_func=infer_func, strict=True)
    assert "generator, which gives any number of responses to a request" in text
    assert "decoupled=True" in text


@pytest.mark.parametrize("name", ["batching", "decoupled", "response_cache"])
def test_switches_are_true_or_false(name: str) -> None:
    assert complaint(ModelConfig(**{name: 1})) == f"{name} must be true or false, got 1"  # type: ignore[arg-type]


def test_concurrency_and_what_an_unrecoverable_error_ends() -> None:
    assert (spec().concurrency, spec().on_unrecoverable) == (0, "shutdown")
    made = spec(concurrency=3, on_unrecoverable="restart_worker")
    assert (made.concurrency, made.on_unrecoverable) == (3, "restart_worker")
    assert complaint(concurrency=0) == "concurrency must be an integer from 1 to 4096, got 0"
    assert complaint(concurrency=5000) == "concurrency must be an integer from 1 to 4096, got 5000"
    assert (
        complaint(on_unrecoverable="exit")
        == "on_unrecoverable must be one of 'shutdown' or 'restart_worker', got 'exit'"
    )


@pytest.mark.parametrize(
    ("name", "version", "one_version", "text"),
    [
        ("m", 1, False, "'m' is bound already"),
        ("M", 2, False, "'M' is bound already, as 'm', and names must differ in more than case"),
        (
            "m",
            2,
            True,
            "'m' is bound already, as version 1, and an attached program serves one version of a name",
        ),
    ],
)
def test_a_version_is_bound_once(name: str, version: int, one_version: bool, text: str) -> None:
    with pytest.raises(DuplicateModel) as error:
        check_new(spec(name=name, version=version), [spec(name="other"), spec()], one_version=one_version)
    assert str(error.value) == f"Cannot add model with the same name twice: {text}"


def test_versions_of_a_name_are_bound_side_by_side() -> None:
    bound = [spec(version=1), spec(version=2)]
    check_new(spec(version=3), bound)
    assert [one.version for one in bound] == [1, 2]


# ---- warm-ups -----------------------------------------------------------------------------------


def test_warmups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("y.npy", np.zeros((1,)))
    y = WarmupInput(bytes, (1,), zero_data=True, random_data=True, input_data_file="y.npy")
    one = ModelWarmup("one", 4, {"y": y, "x": ZEROS}, count=2)
    other = ModelWarmup("other", 1, {"x": WarmupInput("FP32", [0, 3], random_data=True)})  # type: ignore[arg-type]
    assert spec(warmed(one, other)).warmup == (
        (
            "one",
            4,
            2,
            (("x", "FP32", (2, 3), "zero", ""), ("y", "BYTES", (1,), "file", str(tmp_path / "y.npy"))),
        ),
        ("other", 1, 1, (("x", "FP32", (0, 3), "random", ""),)),
    )


def test_a_warmup_of_a_model_that_does_not_batch_or_has_no_inputs() -> None:
    made = spec(warmed(ModelWarmup("w", 9, {"x": ZEROS}), batching=False))
    assert made.warmup == (("w", 9, 1, (("x", "FP32", (2, 3), "zero", ""),)),)
    assert spec(warmed(ModelWarmup("w", 1, {})), inputs=[]).warmup == (("w", 1, 1, ()),)


@pytest.mark.parametrize(
    ("warmup", "text"),
    [
        (ModelWarmup("", 1, {"x": ZEROS}), "the name of a ModelWarmup must be a non-empty string, got ''"),
        (ModelWarmup("w", 0, {"x": ZEROS}), "'w': batch_size must be an integer of at least 1, got 0"),
        (ModelWarmup("w", 5, {"x": ZEROS}), "batch_size must be at most max_batch_size (4), got 5"),
        (ModelWarmup("w", 1, {"x": ZEROS}, count=0), "count must be an integer of at least 1, got 0"),
        (ModelWarmup("w", 1, {"z": ZEROS}), "the model has no input 'z'; its inputs are x, y"),
        (ModelWarmup("w", 1, {}), "warm-up 'w': the input 'x' is missing"),
        (ModelWarmup("w", 1, [ZEROS]), "inputs must be a mapping of names to WarmupInput"),  # type: ignore[arg-type]
        (ModelWarmup("w", 1, {"x": WarmupInput(file=5)}), "input 'x': file must be a path, got 5"),  # type: ignore[arg-type]
        (ModelWarmup("w", 1, {"x": 3}), "input 'x' must be a WarmupInput"),  # type: ignore[dict-item]
        (
            ModelWarmup("w", 1, {"x": WarmupInput(np.int8, (2, 3), True)}),
            "input 'x' is INT8, but the model declares it as FP32",
        ),
        (
            ModelWarmup("w", 1, {"x": WarmupInput(np.float32, (2, 4), True)}),
            "input 'x' has the shape [2, 4], but the model declares [-1, 3]",
        ),
        (ModelWarmup("w", 1, {"x": WarmupInput(np.float32, (-1, 3), True)}), "of at least 0, got (-1, 3)"),
        (ModelWarmup("w", 1, {"x": WarmupInput(np.float32, 3, True)}), "integers of at least 0, got 3"),  # type: ignore[arg-type]
        (ModelWarmup("w", 1, {"x": WarmupInput(np.complex64, (2, 3), True)}), "complex64 has no v2 datatype"),
        (
            ModelWarmup("w", 1, {"x": WarmupInput(np.float32, (2, 3))}),
            "One of 'zero_data', 'random_data', or 'input_data_file' must be provided for warmup input.",
        ),
        (
            ModelWarmup("w", 1, {"x": WarmupInput(np.float32, (2, 3), input_data_file="/no/such.npy")}),
            "there is no file /no/such.npy",
        ),
        ("zeros", "model_warmup must be a list of ModelWarmup, got ['zeros']"),
    ],
)
def test_warmups_that_cannot_be(warmup: Any, text: str) -> None:
    assert text in complaint(warmed(warmup))
