"""Sequences and rate limits as they are declared: in Python, in a file, and told to clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve import (
    DynamicBatcher,
    ModelConfig,
    RateLimiter,
    Resource,
    SequenceBatching,
    SequenceControl,
    Tensor,
)
from gpuserve.api.binding import model_spec
from gpuserve.config.load import Configuration, load_data
from gpuserve.config.problems import ConfigProblems
from gpuserve.core.errors import BadModelConfig
from gpuserve.model.declaration import ModelWarmup, WarmupInput
from gpuserve.model.spec import ModelSpec
from gpuserve.model.triton_config import model_config, plain

X = Tensor((1,), np.int32, "x")


def bound(batcher: Any = None, **config: Any) -> ModelSpec:
    made = ModelConfig(batcher=batcher or DynamicBatcher(), **config)
    return model_spec("m", lambda requests: requests, [X], [X], 1, made, False, "thread")


def sequences(**declared: Any) -> ModelSpec:
    return bound(sequence_batching=SequenceBatching(**declared))


def loaded(tmp_path: Path, server: dict[str, Any] | None = None, **model: Any) -> Configuration:
    (tmp_path / "m.py").write_text("def infer(requests): ...\n")
    tensors = [{"name": "x", "dtype": "int32", "shape": [1]}]
    entry = {
        "name": "m",
        "callable": "m.py:infer",
        "inputs": tensors,
        "outputs": tensors,
        "max_batch_size": 4,
    }
    data = {"server": server or {}, "models": [{**entry, **model}]}
    return load_data(data, "c.yaml", str(tmp_path), {})


def test_all_of_a_declaration_arrives() -> None:
    controls = [
        SequenceControl("START", "start"),
        SequenceControl("END", "end", np.float32, (-1, 2)),
        SequenceControl("READY", "ready", bool, (False, True)),
        SequenceControl("ID", "corrid", "bytes"),
    ]
    spec = sequences(
        strategy="oldest", max_sequence_idle_microseconds=5, max_candidate_sequences=3, controls=controls
    )
    told = (
        SequenceControl("START", "start", "INT32", (0, 1)),
        SequenceControl("END", "end", "FP32", (-1, 2)),
        SequenceControl("READY", "ready", "BOOL", (False, True)),
        SequenceControl("ID", "corrid", "BYTES", (0, 1)),
    )
    assert spec.sequence == SequenceBatching("oldest", 5, 3, 0.0, told)
    assert spec.in_sequences
    assert not spec.retry_on_worker_death
    assert not bound().in_sequences


def test_a_warm_up_has_the_controls_too() -> None:
    warmup = ModelWarmup("w", 1, {"x": WarmupInput(np.int32, (1,), zero_data=True)})
    control = SequenceControl("START", "start", bool, (False, True))
    spec = bound(model_warmup=[warmup], sequence_batching=SequenceBatching(controls=[control]))
    ((_, _, _, inputs),) = spec.warmup
    assert [one[:4] for one in inputs] == [("x", "INT32", (1,), "zero"), ("START", "BOOL", (1,), "zero")]


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"strategy": "newest"}, "strategy must be one of 'direct' or 'oldest', got 'newest'"),
        ({"max_sequence_idle_us": 0}, "max_sequence_idle_us must be an integer of at least 1"),
        ({"max_candidate_sequences": 2}, "_sequences has no effect without the strategy 'oldest'"),
        ({"strategy": "oldest", "max_candidate_sequences": 1 << 20}, "must be an integer from 0 to 65536"),
        ({"minimum_slot_utilization": 1.5}, "minimum_slot_utilization must be a number from 0 to 1, got 1.5"),
        ({"strategy": "oldest", "minimum_slot_utilization": 0.5}, "no effect without the strategy 'direct'"),
        ({"controls": 5}, "controls must be a list of SequenceControl"),
        ({"controls": ["START"]}, "controls[0] must be a SequenceControl, got an object of type str"),
        ({"controls": [SequenceControl("", "start")]}, "must be a non-empty string"),
        (
            {"controls": [SequenceControl("S", "begin")]},
            "kind must be one of 'start', 'end', 'ready' or 'corrid', got 'begin'",
        ),
        ({"controls": [SequenceControl("S", "start", "int8")]}, "must be one of INT32, FP32, BOOL, got INT8"),
        ({"controls": [SequenceControl("S", "start", "no")]}, "controls[0].dtype: 'no' is no tensor"),
        ({"controls": [SequenceControl("S", "start", None, (1, 1))]}, "two different values of INT32"),
        ({"controls": [SequenceControl("S", "start", None, (0, 0.5))]}, "must be two values of INT32"),
        ({"controls": [SequenceControl("x", "start")]}, "'x' has the name of another input"),
        (
            {"controls": [SequenceControl("S", "start"), SequenceControl("T", "start")]},
            "two sequence controls are of kind start",
        ),
    ],
)
def test_what_cannot_be_is_named(declared: dict[str, Any], text: str) -> None:
    with pytest.raises(BadModelConfig, match=re.escape(text)):
        sequences(**declared)


@pytest.mark.parametrize(
    ("batcher", "config", "text"),
    [
        (None, {"response_cache": True}, "Please disable the response cache."),
        (DynamicBatcher(preserve_ordering=True), {}, "preserve_ordering has no effect on sequences"),
        (DynamicBatcher(priority_levels=2, default_priority_level=1), {}, "one level of priority"),
    ],
)
def test_what_does_not_go_with_sequences(batcher: Any, config: dict[str, Any], text: str) -> None:
    with pytest.raises(BadModelConfig, match=text):
        bound(batcher, sequence_batching=SequenceBatching(), **config)
    with pytest.raises(BadModelConfig, match="sequence_batching must be a SequenceBatching, got"):
        bound(sequence_batching="direct")


def test_a_rate_limiter_is_that_of_every_instance() -> None:
    spec = bound(rate_limiter=RateLimiter([Resource("R", 2), Resource("S", shared=True)], 3))
    rate = RateLimiter((Resource("R", 2), Resource("S", 1, True)), 3)
    assert [one.rate for one in spec.instances] == [rate]


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ("R", "rate_limiter must be a RateLimiter, got"),
        (RateLimiter(5), "resources must be a list of Resource"),  # type: ignore[arg-type]
        (RateLimiter(["R"]), r"resources\[0\] must be a Resource"),  # type: ignore[list-item]
        (RateLimiter([Resource("")]), "must be a non-empty string"),
        (RateLimiter([Resource("R", 0)]), r"resources\[0\].count must be an integer of at least 1"),
        (RateLimiter(priority=-1), "priority must be an integer of at least 0"),
    ],
)
def test_a_rate_limiter_that_cannot_be(declared: Any, text: str) -> None:
    with pytest.raises(BadModelConfig, match=text):
        bound(rate_limiter=declared)


def test_a_file_says_the_same(tmp_path: Path) -> None:
    controls = [{"name": "START", "kind": "start"}, {"name": "ID", "kind": "corrid", "dtype": "bytes"}]
    rate_limiter = {"resources": [{"name": "R", "count": 2}, {"name": "S", "shared": True}], "priority": 3}
    (spec,) = loaded(
        tmp_path,
        sequence_batching={"strategy": "oldest", "max_sequence_idle_us": 5, "controls": controls},
        instances=[{"count": 2, "rate_limiter": rate_limiter}, {"device": "cpu"}],
    ).models
    start = SequenceControl("START", "start", "INT32", (0, 1))
    told = (start, SequenceControl("ID", "corrid", "BYTES", (0, 1)))
    assert spec.sequence == SequenceBatching("oldest", 5, controls=told)
    rate = RateLimiter((Resource("R", 2), Resource("S", 1, True)), 3)
    assert [one.rate for one in spec.instances] == [rate, rate, RateLimiter()]
    assert not spec.retry_on_worker_death


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            {"sequence_batching": {"controls": [{"name": "S", "kind": "start", "dtype": "int8"}]}},
            "must be one of INT32, FP32, BOOL, got INT8",
        ),
        ({"sequence_batching": {"max_candidate_sequences": 2}}, "no effect without the strategy 'oldest'"),
        ({"sequence_batching": {}, "response_cache": True}, "Please disable the response cache."),
        ({"sequence_batching": {}, "retry_on_worker_death": True}, "does not go with sequence_batching"),
        ({"sequence_batching": {"strategy": "newest"}}, "'newest'"),
    ],
)
def test_a_file_with_a_mistake(tmp_path: Path, model: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigProblems, match=re.escape(text)):
        loaded(tmp_path, **model)


def test_too_little_of_a_resource_is_found_before_the_start(tmp_path: Path) -> None:
    server = {"rate_limit": "execution_count", "rate_limit_resources": ["R:1"]}
    instances = [{"rate_limiter": {"resources": [{"name": "R", "count": 2}]}}]
    with pytest.raises(ConfigProblems, match='Resource count for "R" is limited to 1'):
        loaded(tmp_path, server, instances=instances)
    server["rate_limit_resources"] = ["R"]
    with pytest.raises(ConfigProblems, match="expected a resource as 'name:count'"):
        loaded(tmp_path, server, instances=instances)


def test_clients_are_told() -> None:
    controls = [SequenceControl("START", "start"), SequenceControl("ID", "corrid", "bytes")]
    spec = bound(
        DynamicBatcher(max_queue_delay_microseconds=7),
        sequence_batching=SequenceBatching(minimum_slot_utilization=0.5, controls=controls),
        rate_limiter=RateLimiter([Resource("R", 2, shared=True)], 3),
    )
    told = plain(model_config(spec))
    assert "dynamic_batching" not in told
    batching = told["sequence_batching"]
    assert batching["max_sequence_idle_microseconds"] == 1_000_000
    assert batching["direct"] == {"max_queue_delay_microseconds": 7, "minimum_slot_utilization": 0.5}
    start, corrid = batching["control_input"]
    assert (start["name"], start["control"][0]["kind"]) == ("START", "CONTROL_SEQUENCE_START")
    assert start["control"][0]["int32_false_true"] == [0, 1]
    assert corrid["control"][0]["data_type"] == "TYPE_STRING"
    (group,) = told["instance_group"]
    assert group["rate_limiter"] == {"resources": [{"name": "R", "global": True, "count": 2}], "priority": 3}


def test_the_other_strategy_is_told_as_well() -> None:
    batcher = DynamicBatcher(preferred_batch_size=[2], preserve_ordering=True)
    spec = bound(batcher, sequence_batching=SequenceBatching("oldest", max_candidate_sequences=9))
    oldest = plain(model_config(spec))["sequence_batching"]["oldest"]
    assert oldest == {
        "max_candidate_sequences": 9,
        "preferred_batch_size": [2],
        "max_queue_delay_microseconds": 0,
        "preserve_ordering": True,
    }
