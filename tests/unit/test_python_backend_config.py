"""``pb_utils.ModelConfig``: what ``auto_complete_config`` may add, and what it may not contradict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuserve.backends.python_backend.triton_model import (
    ModelConfig,
    config_entry,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)

X = {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}


def config(**said: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **said}))


def test_an_empty_configuration_is_completed() -> None:
    made = config()
    made.set_max_batch_size(8)
    made.add_input(X)
    made.add_optional_input({"name": "t", "data_type": "TYPE_STRING", "dims": [1]})
    made.add_output({"name": "y", "data_type": "TYPE_BF16", "dims": [-1]})
    made.set_dynamic_batching()
    made.set_model_transaction_policy({"decoupled": True})
    said = made.as_dict()
    assert get_input_config_by_name(said, "x") == X
    assert get_output_config_by_name(said, "z") is None
    assert using_decoupled_model_transaction_policy(said)
    assert config_entry(json.dumps(said)) == {
        "inputs": [
            {"name": "x", "dtype": "FP32", "shape": [3]},
            {"name": "t", "dtype": "BYTES", "shape": [1], "optional": True},
        ],
        "outputs": [{"name": "y", "dtype": "BF16", "shape": [-1]}],
        "max_batch_size": 8,
        "decoupled": True,
        "batching": {"merge": True},
        "request_details": True,
        "strict": False,
    }


def test_what_is_configured_may_be_said_again() -> None:
    made = config(input=[X], max_batch_size=4, dynamic_batching={"preferred_batch_size": [2]})
    made.add_input(X)
    made.set_max_batch_size(4)
    made.set_dynamic_batching()
    assert made.as_dict()["input"] == [X]
    assert made.as_dict()["dynamic_batching"] == {"preferred_batch_size": [2]}


def test_a_datatype_or_dims_that_are_missing_are_filled_in() -> None:
    made = config(input=[{"name": "x", "data_type": "TYPE_INVALID", "dims": []}])
    made.add_input(X)
    assert made.as_dict()["input"] == [X]


@pytest.mark.parametrize(
    ("said", "call", "text"),
    [
        ({"max_batch_size": 4}, lambda c: c.set_max_batch_size(2), "specified max_batch_size 4, but"),
        ({"sequence_batching": {}}, lambda c: c.set_dynamic_batching(), "'sequence_batching', but"),
        (
            {"input": [X]},
            lambda c: c.add_input({**X, "data_type": "TYPE_INT8"}),
            "expects datatype TYPE_FP32",
        ),
        ({"input": [X]}, lambda c: c.add_input({**X, "dims": [4]}), r"the model expects dims \[4\] but"),
        ({"input": [{**X, "optional": False}]}, lambda c: c.add_optional_input(X), "optional True but"),
        ({}, lambda c: c.add_input({**X, "label": "l"}), "contains property 'label'"),
        ({}, lambda c: c.add_output({**X, "optional": True}), "contains property 'optional'"),
        ({}, lambda c: c.add_output({"name": "y", "dims": [1]}), "output 'y' .* is missing 'data_type'"),
        ({}, lambda c: c.add_input({"dims": [1]}), "input in auto-complete-config .* is missing 'name'"),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "already set to 'False'",
        ),
        ({}, lambda c: c.set_model_transaction_policy({"order": 1}), "contains property 'order'"),
    ],
)
def test_a_contradiction_is_refused(said: dict[str, Any], call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(config(**said))
