"""What a client's config override comes to: from JSON to changes, and from changes to declarations."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import Internal, InvalidArgument
from gpuserve.devices.placement import ANYWHERE, Placement
from gpuserve.front.requests.config_override import BadOverride, read_override
from gpuserve.model.spec import BatchingSpec, InstanceSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve.model.spec_changes import changed
from gpuserve.model.triton_config import model_config, model_config_body
from gpuserve_worker.protocol.tensor import TensorSpec

SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (-1,), False),),
    (TensorSpec("y", "FP32", (-1,), False),),
    8,
    (InstanceSpec("cpu#0", "cpu", {"path": "m.py:M"}),),
)


def after(config: dict[str, Any] | str, spec: ModelSpec = SPEC) -> ModelSpec:
    text = config if isinstance(config, str) else json.dumps(config)
    (one,) = changed([spec], read_override("m", text, [spec]))
    return one


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"max_batch_size": "16"}, "max_batch_size", 16),
        ({"maxBatchSize": 16}, "max_batch_size", 16),
        ({"max_batch_size": 0}, "max_batch_size", 0),
        ({"max_batch_size": None}, "max_batch_size", 8),
        ({"responseCache": {"enable": True}}, "response_cache", True),
        ({"model_transaction_policy": {"decoupled": True}}, "decoupled", True),
        ({"model_transaction_policy": {"decoupled": True}}, "retry_on_worker_death", False),
        (
            {"input": [{"name": "a", "data_type": "TYPE_STRING", "dims": ["-1", 2], "optional": True}]},
            "inputs",
            (TensorSpec("a", "BYTES", (-1, 2), True),),
        ),
        ({"output": [{"name": "b", "dataType": 13, "dims": []}]}, "outputs", (TensorSpec("b", "BYTES", ()),)),
        (
            {"dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "50"}},
            "batching",
            BatchingSpec(50, (4, 8)),
        ),
        (
            {
                "dynamic_batching": {
                    "priority_levels": "2",
                    "default_priority_level": 1,
                    "priority_queue_policy": {"2": {"timeout_action": "DELAY", "max_queue_size": 7}},
                }
            },
            "queue",
            QueueSpec(
                priority_levels=2, default_priority=1, policies=((2, PolicySpec("delay", max_requests=7)),)
            ),
        ),
    ],
)
def test_what_is_changed(config: dict[str, Any], field: str, value: object) -> None:
    assert getattr(after(config), field) == value


def test_what_is_not_named_stays() -> None:
    spec = dataclasses.replace(SPEC, strict=True, queue=QueueSpec(max_requests=3, max_nbytes=4))
    assert after({"max_batch_size": 9}, spec) == dataclasses.replace(spec, max_batch_size=9)
    queue = after({"dynamic_batching": {}}, spec).queue
    assert (queue.max_requests, queue.max_nbytes) == (3, 4)
    assert changed([spec], {}) == [spec]
    assert changed([], {"max_batch_size": 9}) == []


def test_instances() -> None:
    groups = [
        {"count": 2, "kind": "KIND_CPU"},
        {"count": 1, "kind": "KIND_GPU", "gpus": [0, 1]},
        {"count": 1, "kind": "KIND_MODEL", "gpus": [0, 1]},
    ]
    instances = after({"instance_group": groups}).instances
    assert [one.name for one in instances] == ["cpu#0", "cpu#1", "cuda:0#0", "cuda:1#0", "cuda:0+cuda:1#0"]
    assert {one.device for one in instances} == {"cpu", "cuda:0", "cuda:1", "cuda:0+cuda:1"}
    assert all(one.source == SPEC.instances[0].source for one in instances)
    assert len(after({"instance_group": [{"count": 3}]}).instances) == 3
    # The GPUs are not known here: instances are spread over them later.
    instances = after({"instance_group": [{"count": 2, "kind": "KIND_GPU"}]}).instances
    assert [(one.name, one.device) for one in instances] == [("cuda:*#0", "cuda:*"), ("cuda:*#1", "cuda:*")]


def test_instances_that_are_placed_are_placed_anew() -> None:
    placed = InstanceSpec("cuda:0#0", "cuda:0", {}, placement=Placement(("GPU-1",), "GPU-1"))
    spec = dataclasses.replace(SPEC, instances=(placed,))
    groups = [{"count": 1, "kind": "KIND_GPU", "gpus": [1]}]
    (instance,) = after({"instance_group": groups}, spec).instances
    assert (instance.device, instance.placement) == ("cuda:1", ANYWHERE)


def test_inputs_stay_where_they_are_given_to_the_callable() -> None:
    inputs = (
        TensorSpec("x", "FP32", (-1,), memory="gpu"),
        TensorSpec("host", "FP32", (-1,)),
        TensorSpec("s", "FP32", (-1,), memory="gpu"),
    )
    instances = (InstanceSpec("cuda:0#0", "cuda:0", {}),)
    spec = dataclasses.replace(SPEC, inputs=inputs, array="torch", instances=instances)
    given = {"x": "TYPE_FP16", "host": "TYPE_FP32", "s": "TYPE_STRING", "new": "TYPE_INT8"}
    config = {"input": [{"name": name, "data_type": kind, "dims": [2]} for name, kind in given.items()]}
    found = {one.name: one.memory for one in after(config, spec).inputs}
    assert found == {"x": "gpu", "host": "cpu", "s": "cpu", "new": "gpu"}


def test_cupy_arrays_do_not_come_to_the_cpu() -> None:
    instances = (InstanceSpec("cuda:0#0", "cuda:0", {}),)
    spec = dataclasses.replace(SPEC, array="cupy", instances=instances)
    config = {"instance_group": [{"kind": "KIND_CPU"}]}
    with pytest.raises(InvalidArgument, match=r"CuPy arrays as inputs need a GPU: .*, given 'cpu'"):
        after(config, spec)
    assert after(config, dataclasses.replace(spec, array="torch")).instances[0].device == "cpu"


def test_instances_of_different_callables_stay_as_many() -> None:
    two = (InstanceSpec("0", "cpu", {"path": "a:a"}), InstanceSpec("1", "cpu", {"path": "a:b"}))
    spec = dataclasses.replace(SPEC, instances=two)
    assert after({"instance_group": [{"count": 2}]}, spec).instances[1].source == two[1].source
    with pytest.raises(InvalidArgument, match="2 instances have different callables: there cannot be 3"):
        after({"instance_group": [{"count": 3}]}, spec)


def test_versions_are_chosen() -> None:
    specs = [dataclasses.replace(SPEC, version=version) for version in (1, 2, 10)]

    def chosen(policy: dict[str, Any]) -> list[int]:
        changes = read_override("m", json.dumps({"version_policy": policy}), [])
        return sorted(one.version for one in changed(specs, changes))

    assert chosen({"latest": {}}) == [10]
    assert chosen({"latest": {"num_versions": 2}}) == [2, 10]
    assert chosen({"specific": {"versions": ["1", 10]}}) == [1, 10]
    assert chosen({"all": {}}) == [1, 2, 10]
    with pytest.raises(Internal, match=r"^failed to load 'm', no version is available$"):
        chosen({"specific": {"versions": [3]}})


def test_the_config_that_a_client_was_told_changes_nothing() -> None:
    specs = [dataclasses.replace(SPEC, version=version) for version in (1, 2)]
    told = model_config_body(model_config(specs[-1], [1, 2])).decode()
    sizes = [one.max_batch_size for one in changed(specs, read_override("m", told, specs))]
    assert sizes == [8, 8]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "1", '{"a": 1}', '{"max_batch_size": "x"}', "[" * 9999]
)
def test_no_config(text: str) -> None:
    with pytest.raises(BadOverride) as raised:
        read_override("m", text, [SPEC])
    assert 0 < len(str(raised.value)) <= 200


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"sequence_batching": {}}, "sets 'sequence_batching', which cannot be changed"),
        ({"model_warmup": [{"name": "w"}]}, "sets 'model_warmup'"),
        ({"parameters": {"k": {"string_value": "v"}}}, "sets 'parameters'"),
        ({"output": [{"name": "y", "is_shape_tensor": True}]}, "'output.is_shape_tensor'"),
        ({"instance_group": [{"passive": True}]}, "sets 'instance_group.passive'"),
        ({"instance_group": [{"kind": "KIND_MODEL"}]}, "kind KIND_MODEL needs its GPUs named"),
        ({"instance_group": [{"kind": "KIND_CPU", "gpus": [0]}]}, "KIND_CPU but specifies one or more GPUs"),
        ({"instance_group": [{"count": 1000}]}, "256 instances at most"),
        ({"instance_group": [{"count": 1}, {"count": (1 << 31) - 1}]}, "256 instances at most"),
        ({"instance_group": [{"count": -1}]}, "count must be an integer of at least 1"),
        ({"name": "n"}, "has the name 'n'"),
        ({"platform": "tensorrt_plan"}, "has the backend 'tensorrt_plan'"),
        ({"max_batch_size": -1}, "max_batch_size must be"),
        ({"dynamic_batching": {"preferred_batch_size": [9]}}, "9"),
        ({"dynamic_batching": {"priority_levels": 2}}, "default_priority_level"),
        ({"input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [-2]}]}, "dims must be at least 0"),
        ({"input": [{"name": "a", "dims": [1]}]}, "tensor 'a' needs a data_type"),
        ({"output": [{"data_type": "TYPE_FP32"}]}, "a tensor without a name"),
        (
            {"model_transaction_policy": {"decoupled": True}, "response_cache": {"enable": True}},
            "response_cache does not go with decoupled",
        ),
    ],
)
def test_what_cannot_be(config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        after(config)


def test_a_smaller_batch_than_is_preferred() -> None:
    spec = dataclasses.replace(SPEC, batching=BatchingSpec(0, (8,)))
    with pytest.raises(InvalidArgument, match="preferred size must be <= max batch size for m"):
        after({"max_batch_size": 4}, spec)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from([one.name for one in model_config(SPEC).DESCRIPTOR.fields])


@given(st.dictionaries(fields, json_values, max_size=3))
def test_whatever_is_sent_is_a_model_or_a_refusal(config: dict[str, Any]) -> None:
    try:
        spec = after(config)
    except (BadOverride, InvalidArgument, Internal):
        return
    assert spec.instances
    assert spec.max_batch_size >= 0


NAMES = ["max_batch_size", "input", "dynamic_batching", "instance_group", "version_policy", "x"]


@given(st.dictionaries(st.sampled_from(NAMES), json_values, max_size=3))
def test_changes_of_another_process_are_looked_at(changes: dict[str, Any]) -> None:
    told = ""
    try:
        specs = changed([SPEC], changes)
    except (InvalidArgument, Internal) as error:
        specs, told = [], str(error)
    assert all(one.name == "m" for one in specs)
    assert specs or "'m'" in told
