"""Configurations of models, by case: which of them either server loads."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_HEAD: Final = 'backend: "python"\n'
_TENSORS: Final = """
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
"""
_BATCHES: Final = f"max_batch_size: 8\n{_TENSORS}"
_PLAIN: Final = f"max_batch_size: 0\n{_TENSORS}"
_START: Final = "{ name: 'S' control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }] }"


def _input(tensor: str, batch: int = 0) -> str:
    output = 'output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]'
    return f'max_batch_size: {batch}\ninput [{{ name: "X" data_type: TYPE_FP32 {tensor} }}]\n{output}'


def _output(tensor: str) -> str:
    given = 'input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]'
    return f'max_batch_size: 0\n{given}\noutput [{{ name: "Y" data_type: TYPE_FP32 {tensor} }}]'


def _dynamic(text: str) -> str:
    return f"{_BATCHES}dynamic_batching {{ {text} }}"


def _controls(*controls: str, more: str = "") -> str:
    return f"{_BATCHES}sequence_batching {{ control_input [{', '.join(controls)}] {more} }}"


def _control(text: str, name: str = "S") -> str:
    return f'{{ name: "{name}" control [{{ {text} }}] }}'


def _warmup(text: str, base: str = _PLAIN) -> str:
    return f"{base}model_warmup [{{ {text} }}]"


def _groups(*groups: str) -> str:
    kinds = [f"{{ kind: KIND_CPU {one} }}" for one in groups]
    return f"{_PLAIN}instance_group [{', '.join(kinds)}]"


def _with(text: str) -> str:
    return f"{_PLAIN}{text}"


def _warm(value: str) -> str:
    return _warmup(f'name: "w" batch_size: 1 inputs {{ key: "X" value {{ {value} }} }}')


_ZEROS: Final = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: [1] zero_data: true } }'
_POLICY: Final = "priority_queue_policy { key: 1 value { max_queue_size: 4 } }"

#: The text of each config.pbtxt below its backend.
CONFIGS: Final = {
    "plain": _PLAIN,
    "batches": _BATCHES,
    "negative_batch": f"max_batch_size: -1\n{_TENSORS}",
    "policy_without_levels": _dynamic(_POLICY),
    "levels_without_a_default": _dynamic("priority_levels: 3"),
    "levels_and_default": _dynamic("priority_levels: 3 default_priority_level: 2"),
    "default_above_the_levels": _dynamic("priority_levels: 3 default_priority_level: 4"),
    "default_without_levels": _dynamic("default_priority_level: 2"),
    "policy_above_the_levels": _dynamic(
        "priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 4 value { } }"
    ),
    "policy_of_level_0": _dynamic(
        "priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 0 value { } }"
    ),
    "preferred_above_the_batch": _dynamic("preferred_batch_size: [16]"),
    "preferred_0": _dynamic("preferred_batch_size: [0]"),
    "dynamic_without_batches": f"{_PLAIN}dynamic_batching {{ preferred_batch_size: [4] }}",
    "passive_beside_another": _groups("", "passive: true"),
    "passive_alone": _groups("passive: true"),
    "negative_instances": _groups("count: -1"),
    "no_instances": _groups("count: 0"),
    "gpus_of_the_cpu": _groups("gpus: [0]"),
    "reshape_to_nothing": _input("dims: [1] reshape: { shape: [] }"),
    "reshape_that_is_empty": _input("dims: [1] reshape: { }"),
    "reshape_that_is_empty_of_more": _input("dims: [2] reshape: { }"),
    "reshape_to_more": _input("dims: [4] reshape: { shape: [2, 3] }"),
    "reshape_that_fits": _input("dims: [4] reshape: { shape: [2, 2] }"),
    "reshape_of_free_sizes": _input("dims: [-1, 2] reshape: { shape: [2, -1] }"),
    "reshape_of_a_free_size_to_none": _input("dims: [-1] reshape: { shape: [4] }"),
    "reshape_of_blocks_around_free_sizes": _input("dims: [2, -1, 4] reshape: { shape: [2, -1, 2, 2] }"),
    "reshape_that_moves_blocks": _input("dims: [2, -1, 4] reshape: { shape: [4, -1, 2] }"),
    "reshape_with_0": _input("dims: [1] reshape: { shape: [0] }"),
    "reshape_of_an_output": _output("dims: [4] reshape: { shape: [2, 3] }"),
    "reshape_of_an_output_to_nothing": _output("dims: [1] reshape: { shape: [] }"),
    "dims_with_0": _input("dims: [0]"),
    "dims_with_0_in_batches": _input("dims: [2, 0]", 8),
    "dims_below_minus_1": _input("dims: [-2]"),
    "dims_of_a_scalar": _input("dims: []"),
    "dims_of_a_scalar_in_batches": _input("dims: []", 8),
    "no_dims": _input(""),
    "no_dims_in_batches": _input("", 8),
    "output_dims_with_0": _output("dims: [0]"),
    "output_without_dims": _output(""),
    "no_data_type": _PLAIN.replace("data_type: TYPE_FP32", "", 1),
    "input_without_a_name": _input('dims: [1] name: ""'),
    "input_twice": _with('input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]'),
    "output_twice": _with('output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]'),
    "name_of_both": _with('output [{ name: "X" data_type: TYPE_FP32 dims: [1] }]'),
    "ragged": _input("dims: [-1] allow_ragged_batch: true", 8),
    "ragged_without_batches": _input("dims: [-1] allow_ragged_batch: true"),
    "optional": _input("dims: [1] optional: true"),
    "format_without_3_dims": _input("dims: [1] format: FORMAT_NCHW"),
    "controls": _controls(_START),
    "no_controls": _controls(),
    "control_without_a_value": _controls(_control("kind: CONTROL_SEQUENCE_START")),
    "control_of_one_value": _controls(_control("kind: CONTROL_SEQUENCE_START fp32_false_true: [0]")),
    "control_of_two_types": _controls(
        _control("kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] int32_false_true: [0, 1]")
    ),
    "control_twice": _controls(_START, _control("kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1]", "T")),
    "control_without_a_name": _controls(_control("kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1]", "")),
    "corrid": _controls(_control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64")),
    "corrid_without_a_type": _controls(_control("kind: CONTROL_SEQUENCE_CORRID")),
    "corrid_of_floats": _controls(_control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32")),
    "corrid_of_values": _controls(
        _control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 int32_false_true: [0, 1]")
    ),
    "start_of_a_type": _controls(
        _control("kind: CONTROL_SEQUENCE_START data_type: TYPE_FP32 fp32_false_true: [0, 1]")
    ),
    "no_idle_time": _controls(_START, more="max_sequence_idle_microseconds: 0"),
    "oldest": _controls(_START, more="oldest { max_candidate_sequences: 4 }"),
    "oldest_without_candidates": _controls(_START, more="oldest { }"),
    "oldest_preferring_more": _controls(
        _START, more="oldest { max_candidate_sequences: 4 preferred_batch_size: [16] }"
    ),
    "slot_utilization_above_1": _controls(_START, more="direct { minimum_slot_utilization: 1.5 }"),
    "sequences_without_batches": f"{_PLAIN}sequence_batching {{ control_input [{_START}] }}",
    "iterative": _controls(_START, more="iterative_sequence: true"),
    "iterative_without_controls": f"{_BATCHES}sequence_batching {{ iterative_sequence: true }}",
    "iterative_without_batches": f"{_PLAIN}sequence_batching {{ iterative_sequence: true }}",
    "iterative_oldest": _controls(
        _START, more="iterative_sequence: true oldest { max_candidate_sequences: 16 }"
    ),
    "iterative_control_twice": _controls(
        _START,
        _control("kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1]", "T"),
        more="iterative_sequence: true",
    ),
    "warmup": _warmup(f'name: "w" batch_size: 1 {_ZEROS}'),
    "warmup_without_a_name": _warmup(f"batch_size: 1 {_ZEROS}"),
    "warmup_of_batch_0": _warmup(f'name: "w" {_ZEROS}'),
    "warmup_of_more_than_a_batch": _warmup(f'name: "w" batch_size: 9 {_ZEROS}', _BATCHES),
    "warmup_of_2_without_batches": _warmup(f'name: "w" batch_size: 2 {_ZEROS}'),
    "warmup_without_inputs": _warmup('name: "w" batch_size: 1'),
    "warmup_of_an_unknown_input": _warmup(
        'name: "w" batch_size: 1 inputs { key: "Z" value { data_type: TYPE_FP32 dims: [1] zero_data: true } }'
    ),
    "warmup_without_a_type": _warm("dims: [1] zero_data: true"),
    "warmup_of_a_free_size": _warm("data_type: TYPE_FP32 dims: [-1] zero_data: true"),
    "warmup_of_a_missing_file": _warm('data_type: TYPE_FP32 dims: [1] input_data_file: "f"'),
    "cache_of_a_decoupled_model": _with(
        "model_transaction_policy { decoupled: true } response_cache { enable: true }"
    ),
    "sequences_of_a_decoupled_model": f"{_controls(_START)} model_transaction_policy {{ decoupled: true }}",
    "no_version_of_the_policy": _with("version_policy { specific { versions: [7] } }"),
    "latest_0": _with("version_policy { latest { num_versions: 0 } }"),
    "another_name": _with('name: "other"'),
    "unknown_field": _with("nonsense: 1"),
    "label_file_that_is_missing": _output('dims: [1] label_filename: "no.txt"'),
    "batch_input_of_no_input": _BATCHES
    + 'batch_input [{ kind: BATCH_ELEMENT_COUNT target_name: "C" data_type: TYPE_FP32 source_input: "Z" }]',
    "resource_without_a_name": _groups("rate_limiter { resources [{ count: 1 }] }"),
    "resource_of_count_0": _groups('rate_limiter { resources [{ name: "R" }] }'),
    "TestModel123": _PLAIN,
    "shape_tensor": _input("dims: [1] is_shape_tensor: true"),
}

#: The configurations that Triton 2.51 refuses.
REFUSED_BY_TRITON: Final = frozenset(
    """
    negative_batch levels_without_a_default default_above_the_levels policy_above_the_levels
    policy_of_level_0 preferred_above_the_batch preferred_0 dynamic_without_batches gpus_of_the_cpu
    reshape_to_nothing reshape_that_is_empty reshape_that_is_empty_of_more reshape_to_more
    reshape_of_free_sizes reshape_of_a_free_size_to_none reshape_that_moves_blocks reshape_with_0
    reshape_of_an_output reshape_of_an_output_to_nothing dims_with_0 dims_with_0_in_batches
    dims_below_minus_1 dims_of_a_scalar dims_of_a_scalar_in_batches no_dims no_dims_in_batches
    output_dims_with_0 output_without_dims no_data_type input_without_a_name format_without_3_dims
    control_without_a_value control_of_one_value control_of_two_types control_twice
    control_without_a_name iterative_control_twice corrid_without_a_type corrid_of_floats corrid_of_values
    oldest_preferring_more slot_utilization_above_1 warmup_of_more_than_a_batch
    warmup_of_2_without_batches warmup_without_inputs warmup_of_an_unknown_input
    warmup_without_a_type warmup_of_a_free_size warmup_of_a_missing_file cache_of_a_decoupled_model
    no_version_of_the_policy latest_0 another_name unknown_field label_file_that_is_missing
    batch_input_of_no_input shape_tensor
    """.split()  # noqa: SIM905
)
#: The configurations that Triton loads and this server refuses.
REFUSED_HERE: Final = frozenset(
    ("passive_alone", "negative_instances", "input_twice", "output_twice", "resource_without_a_name")
)

_MODEL: Final = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        y = pb_utils.Tensor("Y", np.zeros((1,), np.float32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""


def write(repository: Path) -> None:
    """Write a folder for each case."""
    for name, text in CONFIGS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL)
        (folder.parent / "config.pbtxt").write_text(_HEAD + text.replace("'", '"') + "\n")
