"""What a client is told of a model's configuration: the message, and its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.model.spec import BatchingSpec, InstanceSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve.model.triton_config import model_config, model_config_body, plain
from gpuserve_worker.protocol.tensor import TensorSpec


def spec(**more: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": "m",
        "inputs": (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("text", "BYTES", (1,), True)),
        "outputs": (TensorSpec("y", "BF16", ()),),
        "max_batch_size": 8,
        "instances": (InstanceSpec("0", "cpu", {}), InstanceSpec("1", "cpu", {})),
        **more,
    }
    return ModelSpec(**values)


def document(**more: Any) -> Any:
    return json.loads(model_config_body(model_config(spec(**more))))


def test_tensors_are_without_the_batch_axis() -> None:
    found = document()
    tensors = [
        (one["name"], one["data_type"], one["dims"], one.get("optional"))
        for one in (*found["input"], *found["output"])
    ]
    x, text = ("x", "TYPE_FP32", [-1, 3], False), ("text", "TYPE_STRING", [1], True)
    assert tensors == [x, text, ("y", "TYPE_BF16", [], None)]


def test_what_identifies_the_model() -> None:
    found = document(version=7, decoupled=True, response_cache=True)
    assert (found["name"], found["platform"], found["backend"]) == ("m", "python", "python")
    assert found["version_policy"] == {"specific": {"versions": [7]}}
    assert found["model_transaction_policy"] == {"decoupled": True}
    assert found["response_cache"] == {"enable": True}


def test_what_is_default_is_said_but_for_messages() -> None:
    found = document()
    assert found["response_cache"] == {"enable": False}
    assert (found["model_warmup"], found["parameters"], found["default_model_filename"]) == ([], {}, "")
    assert not {"sequence_batching", "ensemble_scheduling", "optimization"} & set(found)


def policy(action: str, timeout_us: int, override: bool, size: int) -> dict[str, Any]:
    times = {"default_timeout_microseconds": timeout_us, "allow_timeout_override": override}
    return {"timeout_action": action, **times, "max_queue_size": size}


DEFAULTS = {
    "preferred_batch_size": [8],  # as large as batches may be, where no size is preferred
    "max_queue_delay_microseconds": 0,
    "preserve_ordering": False,
    "priority_levels": 0,
    "default_priority_level": 0,
    "priority_queue_policy": {},
}


def test_dynamic_batching() -> None:
    assert document()["dynamic_batching"] == DEFAULTS
    policies = ((1, PolicySpec("reject", 1 << 40, True, 5)),)
    queue = QueueSpec(
        0, 0, priority_levels=3, default_priority=2, policy=PolicySpec("delay"), policies=policies
    )
    found = document(batching=BatchingSpec(500, (4, 8), preserve_ordering=True), queue=queue)
    assert found["dynamic_batching"] == {
        "preferred_batch_size": [4, 8],
        "max_queue_delay_microseconds": 500,
        "preserve_ordering": True,
        "priority_levels": 3,
        "default_priority_level": 2,
        "default_queue_policy": policy("DELAY", 0, False, 0),
        "priority_queue_policy": {"1": policy("REJECT", 1 << 40, True, 5)},
    }


@pytest.mark.parametrize("more", [{"max_batch_size": 0}, {"batching": BatchingSpec(merge=False)}])
def test_a_model_whose_requests_are_not_merged_says_no_dynamic_batching(more: dict[str, Any]) -> None:
    assert "dynamic_batching" not in document(**more)


def test_one_group_a_device() -> None:
    (group,) = document()["instance_group"]
    assert (group["name"], group["count"], group["kind"], group["gpus"]) == ("m", 2, "KIND_CPU", [])
    devices = ("cuda:1", "cpu", "cuda:1", "cuda:0", "cuda:0+cuda:1")
    found = document(instances=tuple(InstanceSpec(one, one, {}) for one in devices))["instance_group"]
    assert [(one["name"], one["count"], one["kind"], one["gpus"]) for one in found] == [
        ("m_0", 2, "KIND_GPU", [1]),
        ("m_1", 1, "KIND_CPU", []),
        ("m_2", 1, "KIND_GPU", [0]),
        ("m_3", 1, "KIND_MODEL", [0, 1]),
    ]


def test_json_says_the_same_as_the_message() -> None:
    config = model_config(spec())
    del (found := plain(config))["instance_group"]
    (named,) = [one for one in found["input"] if one["name"] == "text"]
    assert named["dims"] == list(config.input[1].dims) == [1]
    assert isinstance(config, pb.ModelConfig)
