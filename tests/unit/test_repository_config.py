"""Model repositories of Triton come to the models of a configuration, or to sentences: where, and why not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from exploring import examples
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_packages import needs
from triton_differences.model_py import configs
from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.load import Configuration
from gpuserve.config.precedence import Override
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.triton.load import RepositoryLoader, TritonRepository
from gpuserve.config.triton.pbtxt import TABLES, YES, Treatment, findings, parse
from gpuserve.model.spec import ModelSpec, PolicySpec
from gpuserve.model.triton_config import model_config

TENSORS = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
MODEL = 'backend: "python"\nmax_batch_size: 8' + TENSORS


def write(repository: Path, name: str, config: str | None, *versions: int, file: str = "model.py") -> Path:
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    for version in versions or (1,):
        (folder / str(version)).mkdir()
        (folder / str(version) / file).touch()
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def loaded(repository: Path, **environ: str) -> Configuration:
    return RepositoryLoader([str(repository)], environ, ()).load()


def only(repository: Path, config: str | None = None, file: str = "model.py") -> ModelSpec:
    """The one model of the repository, or one ``m`` with that config."""
    if config is not None:
        write(repository, "m", config, file=file)
    (spec,) = loaded(repository).models
    return spec


def problem(repository: Path, config: str | None = None, file: str = "model.py") -> str:
    """What is wrong with the model ``m``, which cannot be served, from the place in its config.pbtxt on."""
    if config is not None:
        write(repository, "m", config, file=file)
    with pytest.raises(ConfigProblems) as failure:
        loaded(repository)
    (first, *_) = failure.value.problems
    assert first.label == str(repository / "m" / "config.pbtxt")
    assert first.span is not None
    return f"{first.span.line}:{first.span.column}: {first.message}"


# ---- every field ----


def decided_messages() -> Iterator[Any]:
    """``ModelConfig``, and every message in a field that is honoured."""
    left, seen = [pb.ModelConfig.DESCRIPTOR], set()
    for descriptor in left:
        yield descriptor
        table = TABLES[descriptor.full_name.removeprefix("inference.")]
        for field in descriptor.fields:
            inner = field.message_type
            if inner is not None and inner.GetOptions().map_entry:
                inner = inner.fields_by_name["value"].message_type
            is_new = inner is not None and inner.full_name not in seen
            if is_new and table.get(field.name) == YES:
                seen.add(inner.full_name)
                left.append(inner)


def test_every_field_of_every_message_is_honoured_without_effect_or_refused() -> None:
    fields = {
        one.full_name.removeprefix("inference."): {field.name for field in one.fields}
        for one in decided_messages()
    }
    assert fields == {name: set(table) for name, table in TABLES.items()}


def test_what_is_not_honoured_says_why() -> None:
    rules = [rule for table in TABLES.values() for rule in table.values()]
    assert all(rule.text or rule.treatment is Treatment.HONOURED for rule in rules)


def test_the_documents_name_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    section = text.partition("### Fields")[2].partition("\n#")[0]
    named = set(re.findall(r"`(\w+)`", section))
    inside = {"ModelOptimizationPolicy", "ModelConfig", "ModelInput", "ModelOutput", "ModelInstanceGroup"}
    fields = {field for name in inside for field in TABLES[name]} | {
        field for table in TABLES.values() for field, rule in table.items() if rule != YES
    }
    assert fields - named == set()


@pytest.mark.parametrize(
    ("text", "place", "treatment"),
    [
        ("input { is_shape_tensor: true }", ("input", 0, "is_shape_tensor"), "REFUSED"),
        (
            "sequence_batching { state { use_growable_memory: true } }",
            ("sequence_batching", "state", 0, "use_growable_memory"),
            "WITHOUT_EFFECT",
        ),
        ("optimization { eager_batching: true }", ("optimization", "eager_batching"), "WITHOUT_EFFECT"),
        ('instance_group [ {}, { profile: "1" } ]', ("instance_group", 1, "profile"), "REFUSED"),
    ],
)
def test_a_field_that_is_not_honoured_is_found_where_it_stands(
    text: str, place: tuple[str | int, ...], treatment: str
) -> None:
    pbtxt = parse(text)
    ((path, rule),) = findings(pbtxt.message)
    assert (path, rule.treatment) == (place, Treatment[treatment])
    assert pbtxt.has(*place)


# ---- places ----

NAMES = st.text("abc'\" \\é", max_size=5)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    tensors = st.builds(
        lambda name, dims: pb.ModelInput(name=name, dims=dims, data_type=pb.TYPE_FP32),
        NAMES,
        st.lists(st.integers(-1, 9), max_size=3),
    )
    message = pb.ModelConfig(
        name=draw(NAMES), max_batch_size=draw(st.integers(0, 9)), input=draw(st.lists(tensors, max_size=3))
    )
    for name in draw(st.lists(st.sampled_from("abcd"), max_size=3)):
        message.parameters[name].string_value = draw(NAMES)
    return message


@settings(max_examples=examples(100), deadline=None)
@given(messages(), st.booleans())
def test_every_value_is_found_where_protobuf_wrote_it(message: Any, as_one_line: bool) -> None:
    text = text_format.MessageToString(message, as_one_line=as_one_line, use_short_repeated_primitives=True)
    pbtxt = parse(text)
    assert pbtxt.message == message
    for number, tensor in enumerate(message.input):
        for place, dim in enumerate(tensor.dims):
            span = pbtxt.span(("input", number, "dims", place))
            line = pbtxt.line(span.line)
            assert line[span.column - 1 :][: span.length] == str(dim)
    for name in message.parameters:
        assert pbtxt.has("parameters", name)


# ---- what a model comes to ----


def test_a_python_model_is_the_callable_that_runs_model_py(tmp_path: Path) -> None:
    folder = write(tmp_path, "echo", MODEL + 'parameters { key: "a" value: { string_value: "b" } }')
    spec = only(tmp_path)
    (instance,) = spec.instances
    assert instance.source["path"] == "gpuserve.backends.python_backend.triton_model:TritonModel"
    kwargs = instance.source["kwargs"]
    config = json.loads(kwargs.pop("config"))
    assert kwargs == {"model_dir": str(folder), "version": "1", "file": "model.py"}
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("echo", "python", 8)
    assert config["parameters"] == {"a": {"string_value": "b"}}


THREADS = 'parameters { key: "intra_op_thread_count" value { string_value: "3" } }'


@pytest.mark.parametrize(
    ("config", "file", "kwargs"),
    [
        (f'platform: "onnxruntime_onnx" {THREADS}', "model.onnx", {"intra_op_num_threads": 3}),
        pytest.param(f'platform: "pytorch_libtorch" {THREADS}', "model.pt", {}, marks=needs("torch")),
        pytest.param('platform: "pytorch_libtorch"', "model.pt2", {}, marks=needs("torch")),
        pytest.param("", "model.pt", {}, marks=needs("torch"), id="the backend is that of the file"),
    ],
)
def test_a_model_file_is_the_callable_of_its_runtime(
    tmp_path: Path, config: str, file: str, kwargs: dict[str, Any]
) -> None:
    spec = only(tmp_path, config + TENSORS, file=file)
    path, array = {
        "model.onnx": ("gpuserve.backends.onnx:OnnxModel", "numpy"),
        "model.pt": ("gpuserve.backends.pytorch:PytorchModel", "torch"),
        "model.pt2": ("gpuserve.backends.pytorch:PytorchModel", "torch"),
    }[file]
    source = spec.instances[0].source
    assert (source["path"], spec.array) == (path, array)
    assert source["kwargs"] == {"file": str(tmp_path / "m" / "1" / file), **kwargs}


def test_a_reshape_stands_between_clients_and_the_model(tmp_path: Path) -> None:
    config = TENSORS.replace("dims: [ -1 ]", "dims: [ 4, -1 ] reshape { shape: [ 1, 4, -1 ] }")
    spec = only(tmp_path, config, file="model.onnx")
    assert spec.inputs[0].shape == (4, -1)
    assert spec.instances[0].source["path"] == "gpuserve.config.triton.reshaping:ReshapedModel"
    assert spec.instances[0].source["kwargs"] == {
        "path": "gpuserve.backends.onnx:OnnxModel",
        "kwargs": {"file": str(tmp_path / "m" / "1" / "model.onnx")},
        "inputs": {"x": [[4, -1], [1, 4, -1]]},
        "outputs": {"y": [[1, 4, -1], [4, -1]]},
    }


def test_an_environment_of_a_python_model(tmp_path: Path) -> None:
    value = 'value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" }'
    environment = tmp_path / "m" / "env.tar.gz"
    environment.parent.mkdir()
    environment.touch()
    spec = only(tmp_path, MODEL + f'parameters {{ key: "EXECUTION_ENV_PATH" {value} }}')
    assert spec.instances[0].source["python"] == str(environment)


@pytest.mark.parametrize(
    ("config", "option", "value"),
    [
        ("", "batching.merge", False),
        ("dynamic_batching { preserve_ordering: true }", "batching.preserve_ordering", True),
        ("response_cache { enable: true }", "response_cache", True),
    ],
)
def test_one_option_of_a_model(tmp_path: Path, config: str, option: str, value: bool) -> None:
    assert attrgetter(option)(only(tmp_path, MODEL + config)) is value


def test_dynamic_batching_with_all_its_policies(tmp_path: Path) -> None:
    policies = """dynamic_batching {
      preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
      priority_levels: 3 default_priority_level: 2
      default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 50 }
      priority_queue_policy { key: 1 value { max_queue_size: 3 allow_timeout_override: true } } }"""
    spec = only(tmp_path, MODEL + policies)
    assert spec.batching.merge
    assert spec.batching.preferred_batch_sizes == (4, 8)
    assert spec.batching.max_queue_delay_us == 100
    assert (spec.queue.priority_levels, spec.queue.default_priority) == (3, 2)
    assert spec.queue.policy == PolicySpec("delay", 50)
    assert spec.queue.policies == ((1, PolicySpec(max_requests=3, allow_timeout_override=True)),)


def test_sequences_with_direct_strategy(tmp_path: Path) -> None:
    batching = """sequence_batching {
      direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.1 }
      max_sequence_idle_microseconds: 70
      control_input [
        { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
        { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] } ] }"""
    spec = only(tmp_path, MODEL + batching)
    assert (spec.sequence.strategy, spec.sequence.max_sequence_idle_us) == ("direct", 70)
    assert (spec.sequence.minimum_slot_utilization, spec.batching.max_queue_delay_us) == (0.1, 5)
    controls = [(one.name, one.kind, one.dtype) for one in spec.sequence.controls]
    assert controls == [("READY", "ready", "INT32"), ("ID", "corrid", "BYTES")]


def test_sequences_with_oldest_strategy(tmp_path: Path) -> None:
    batching = """sequence_batching {
      oldest { max_candidate_sequences: 3 preferred_batch_size: 2 preserve_ordering: true }
      control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 0.5 ] } } }"""
    spec = only(tmp_path, MODEL + batching)
    assert (spec.sequence.strategy, spec.sequence.max_candidate_sequences) == ("oldest", 3)
    assert (spec.batching.preferred_batch_sizes, spec.batching.preserve_ordering) == ((2,), True)
    assert spec.sequence.controls[0].false_true == (0, 0.5)


def test_iterative_sequences_are_steps(tmp_path: Path) -> None:
    text = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 30 } }"
    spec = only(tmp_path, MODEL + text)
    assert (spec.max_active, spec.max_batch_size, spec.in_sequences) == (30, 1, False)
    shown = model_config(spec)
    assert (shown.max_batch_size, shown.sequence_batching.oldest.max_candidate_sequences) == (8, 30)


def step(model: str, given: str, returned: str, more: str = "") -> str:
    maps = f'input_map {{ key: "x" value: "{given}" }} output_map {{ key: "y" value: "{returned}" }}'
    return f'step {{ model_name: "{model}" {maps} {more} }}'


def ensemble(*steps: str) -> str:
    return f'platform: "ensemble" max_batch_size: 8{TENSORS}ensemble_scheduling {{ {" ".join(steps)} }}'


def test_an_ensemble_of_two_models(tmp_path: Path) -> None:
    write(tmp_path, "first", MODEL)
    write(tmp_path, "second", MODEL)
    steps = step("first", "x", "b", "model_version: -1"), step("second", "b", "y", "model_version: 1")
    shutil.rmtree(write(tmp_path, "both", ensemble(*steps)) / "1")  # an ensemble needs no version folder
    both, *_ = loaded(tmp_path).models
    assert [(one.model, one.version, one.inputs, one.outputs) for one in both.steps] == [
        ("first", 0, (("x", "x"),), (("y", "b"),)),
        ("second", 1, (("x", "b"),), (("y", "y"),)),
    ]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("", ["cpu#0"]),
        ("instance_group { count: 2 kind: KIND_CPU }", ["cpu#0", "cpu#1"]),
        ("instance_group { count: 2 } instance_group { kind: KIND_MODEL }", ["cpu#0", "cpu#1", "cpu#2"]),
    ],
)
def test_instance_groups_where_there_is_no_gpu(tmp_path: Path, groups: str, devices: list[str]) -> None:
    assert [one.name for one in only(tmp_path, MODEL + groups).instances] == devices


def test_a_rate_limiter_of_an_instance_group(tmp_path: Path) -> None:
    limiter = 'priority: 2 resources { name: "R" count: 3 global: true } resources { name: "S" }'
    rate = only(tmp_path, MODEL + f"instance_group {{ rate_limiter {{ {limiter} }} }}").instances[0].rate
    resources = [(one.name, one.count, one.shared) for one in rate.resources]
    assert (rate.priority, resources) == (2, [("R", 3, True), ("S", 1, False)])


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", [10]),
        ("version_policy { latest { num_versions: 2 } }", [3, 10]),
        ("version_policy { all { } }", [1, 3, 10]),
        ("version_policy { specific { versions: [ 1, 3 ] } }", [1, 3]),
        ("version_policy { specific { versions: [ 1, 77 ] } }", [1]),
    ],
)
def test_version_policies(tmp_path: Path, policy: str, versions: list[int]) -> None:
    folder = write(tmp_path, "m", MODEL + policy, 1, 3, 10)
    for name in ("0", "02", "notes", ".git"):  # folders that are no versions
        (folder / name).mkdir()
    assert [one.version for one in loaded(tmp_path).models] == versions


def test_labels_warm_ups_and_the_other_options_of_a_model(tmp_path: Path) -> None:
    tensors = MODEL.replace('"y"', '"y" label_filename: "labels.txt"').replace('"x"', '"x" optional: true')
    config = f"""{tensors}
        model_transaction_policy {{ decoupled: true }} default_model_filename: "other.py"
        model_warmup {{ name: "w" batch_size: 2 count: 3
          inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 4 zero_data: true }} }} }}"""
    folder = write(tmp_path, "m", config, file="other.py")
    (folder / "labels.txt").write_text("cat\ndog\n")
    spec = only(tmp_path)
    assert (spec.labels[0].labels, spec.labels[0].filename) == (("cat", "dog"), "labels.txt")
    assert (spec.inputs[0].optional, spec.decoupled) == (True, True)
    assert spec.warmup == (("w", 2, 3, (("x", "FP32", (4,), "zero", ""),)),)
    assert spec.instances[0].source["kwargs"]["file"] == "other.py"


def test_a_variable_says_something_else_than_the_file(tmp_path: Path) -> None:
    write(tmp_path, "m", MODEL)
    write(tmp_path, "broken", "nonsense")
    variables = {"GPUSERVE_MODELS__M__MAX_BATCH_SIZE": "4", "GPUSERVE_MODELS__BROKEN__MAX_BATCH_SIZE": "4"}
    configuration = loaded(tmp_path, **variables)
    assert [one.max_batch_size for one in configuration.models] == [4]


def test_what_has_no_effect_is_remarked_upon_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, MODEL + 'metric_tags { key: "k" value: "v" }')
    (remark,) = loaded(tmp_path).remarks
    assert remark.startswith("metric_tags has no effect: ")
    assert remark.endswith("(model a, b)")


def test_several_repositories(tmp_path: Path) -> None:
    for path in ("one/a", "one/twice", "two/b", "two/twice"):
        write(tmp_path, path, MODEL)
    configuration = RepositoryLoader([str(tmp_path / "one"), str(tmp_path / "two")], {}, ()).load()
    assert [one.name for one in configuration.models] == ["a", "b"]
    assert "expected it in one repository" in str(configuration.broken["twice"])


# ---- what is wrong ----


RESHAPED = MODEL.replace("dims: [ -1 ]", "dims: [ 2 ] reshape { shape: [ 1, 2 ] }")
ITERATIVE = "sequence_batching { iterative_sequence: true }"
WARM_UP = 'model_warmup { name: "w" inputs { key: "%s" value { %s } } }'
ONNX = 'backend: "onnxruntime" max_batch_size: 8' + TENSORS


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("max_batch: 3", "1:1: ModelConfig has no field 'max_batch'; did you mean 'max_batch_size'?"),
        ('max_batch_size: "8"', '1:17: couldn\'t parse integer: "8"'),
        ('backend: "python', "1:10: string missing ending quote: '\"python'"),
        ("input [ { }\n}", '2:1: expected ","'),
        (
            "input { data_type: TYPE_FLOAT }",
            "1:20: there is no DataType TYPE_FLOAT; expected one of TYPE_INVA",
        ),
        (
            MODEL + "dynamic_batching {} sequence_batching {}",
            '5:21: field "sequence_batching" is specified al',
        ),
        (MODEL + 'name: "other"', "5:7: the model is called 'other', its folder 'm'; they must agree"),
        (MODEL.replace("data_type: TYPE_FP32 ", "", 1), "3:9: tensor 'x' has no data_type; expected one"),
        (MODEL.replace("dims: [ -1 ]", "", 1), "3:9: tensor 'x' has no dims; expected a list"),
        (MODEL.replace("-1", "-2", 1), "3:50: input[0].dims[0]: expected an integer of at least -1"),
        (MODEL.replace("8", "-8", 1), "2:17: max_batch_size: expected an integer of at least 0"),
        (MODEL.replace('"y"', '"y" label_filename: "no.txt"'), "4:38: output 'y': the file cannot be read"),
        (
            MODEL + "dynamic_batching { preferred_batch_size: 9 }",
            "5:42: expected a preferred batch size of at",
        ),
        (RESHAPED + ITERATIVE, "5:41: reshape does not go with iterative_sequence"),
        (MODEL.replace("python", "pytorch") + ITERATIVE, "5:41: iterative_sequence goes with backend python"),
        (MODEL + "instance_group { kind: KIND_GPU }", "5:24: this machine has no device"),
        (MODEL + "instance_group { kind: KIND_MODEL gpus: [ 0, 1 ] }", "5:43: this machine has no device"),
        (MODEL + "instance_group { kind: KIND_CPU gpus: 0 }", "5:39: gpus do not go with KIND_CPU"),
        (
            MODEL + "instance_group { count: -1 }",
            "5:25: instance_group[0].count: expected an integer from 1 to",
        ),
        (
            MODEL + 'cc_model_filenames { key: "7.0" value: "m" }',
            "5:1: cc_model_filenames cannot be honoured",
        ),
        (MODEL + "version_policy { specific { versions: 7 } }", "5:18: no version that version_policy names"),
        (MODEL + 'default_model_filename: "a.py"', "5:25: there is no a.py in "),
        ('backend: "pyton"' + TENSORS, "1:10: there is no backend 'pyton'; did you mean 'python'?"),
        (ONNX, "1:1: there is no model.onnx in "),
        (
            RESHAPED.replace("[ 1, 2 ]", "[ 3 ]"),
            "3:54: reshape of 'x' must have as many elements and free sizes as its dims [2], given [3]",
        ),
        ('platform: "tensorrt_plan"', "1:11: there is no backend 'tensorrt_plan' here"),
        ('backend: "fil"', "1:10: there is no backend 'fil' here"),
        (MODEL + WARM_UP % ("x", "data_type: TYPE_FP32 dims: 1"), "5:26: expected zero_data: t"),
        (MODEL + WARM_UP % ("z", "zero_data: true"), "5:"),
        (ensemble(step("n", "x", "y")), "4:42: there is no model 'n'"),
        (ensemble(), "4:1: ensemble_scheduling.step: expected at least one entry"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, config: str, said: str) -> None:
    assert problem(tmp_path, config).startswith(said)


STATE = ' input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 2, -1 ] '
INITIAL = 'name: "i" data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true'
DIMS = "initial_state of 's': expected dims that fit those of the state, [2, -1]"


def test_implicit_state_is_an_argument_of_the_file(tmp_path: Path) -> None:
    file = INITIAL.replace("zero_data: true", 'data_file: "f"')
    other = STATE.replace('"s"', '"u"')
    states = f"state [ {{{STATE}}}, {{{other} initial_state {{ {file} }} }} ]"
    spec = only(tmp_path, f"{ONNX} sequence_batching {{ {states} }}", file="model.onnx")
    path = str(tmp_path / "m" / "initial_state" / "f")
    tensors = [["s", "t", "FP32", [2, 1], "", False], ["u", "t", "FP32", [2, 3], path, False]]
    assert spec.instances[0].source["kwargs"]["states"] == {"tensors": tensors, "controls": []}
    assert len(model_config(spec).sequence_batching.state) == 2


@pytest.mark.parametrize(
    ("model", "old", "new", "said"),
    [
        (MODEL, "", "", "state goes with backend onnxruntime or"),
        (ONNX, "data_type: TYPE_FP32", "", "the state"),
        (
            ONNX,
            '"s"',
            '"x"',
            "expected an input_name that is no other input, and an output_name, given 'x' and",
        ),
        (
            ONNX,
            "FP32 dims: [ 2, 3",
            "FP64 dims: [ 2, 3",
            "initial_state of 's': expected the data_type of the state",
        ),
        (ONNX, 'name: "i"', "", "initial_state of 's': expected a name"),
        (ONNX, "zero_data: true", "", "initial_state of 's': expected zero_data: true or data_file"),
        (ONNX, "2, 3", "2", DIMS),
        (ONNX, "2, 3", "3, 3", DIMS),
        (ONNX, "2, 3", "2, -1", DIMS),
        (
            ONNX.replace("dims: [ -1 ]", "dims: [ -1 ] allow_ragged_batch: true", 1),
            "",
            "",
            "state does not go with batch_input or allow_ragged_batch",
        ),
    ],
)
def test_a_state_that_triton_refuses_is_refused(
    tmp_path: Path, model: str, old: str, new: str, said: str
) -> None:
    state = f"{STATE} initial_state {{ {INITIAL} }}".replace(old, new, 1 if old else 0)
    file = "model.onnx" if "onnx" in model else "model.py"
    found = problem(tmp_path, f"{model} sequence_batching {{ state {{{state}}} }}", file)
    assert found.partition(": ")[2].startswith(said)


def test_triton_and_this_server_load_the_same_configurations(tmp_path: Path) -> None:
    configs.write(tmp_path)
    loads = {name: name not in configs.REFUSED_BY_TRITON | configs.REFUSED_HERE for name in configs.CONFIGS}
    configuration = loaded(tmp_path)
    assert {name: name not in configuration.broken for name in configs.CONFIGS} == loads


def test_a_model_without_its_file_or_version_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, "m", MODEL)
    shutil.rmtree(folder / "1")
    expected = f"1:1: the model has no version folder: expected its file in {folder / '1'}"
    assert problem(tmp_path) == expected
    folder = write(tmp_path, "m", MODEL, file="other.py")
    assert problem(tmp_path) == f"1:1: there is no model.py in {folder / '1'}, which has other.py"
    (folder / "1" / "other.py").unlink()
    assert problem(tmp_path) == f"1:1: there is no model.py in {folder / '1'}, which has no file"


@pytest.mark.parametrize(
    ("path", "text", "given", "said"),
    [
        (
            "notes/",
            "",
            ".",
            r"/notes: the folder is no model: expected a config.pbtxt and version folders \(1, 2, …\)$",
        ),
        ("config.yaml", "models: []\n", ".", r"has no models: .*; or serve .*/config\.yaml$"),
        ("models/", "", "models", "has no models: expected a folder for each"),
        ("", "", "models", "cannot be read: no such file or directory"),
        ("m/config.pbtxt", MODEL, "m", "is the folder of one model"),
    ],
)
def test_a_folder_that_is_no_repository(tmp_path: Path, path: str, text: str, given: str, said: str) -> None:
    folder, _, file = path.rpartition("/")
    (tmp_path / folder).mkdir(exist_ok=True)
    if file:
        (tmp_path / path).write_text(text)
    with pytest.raises(ConfigProblems, match=said):
        loaded(tmp_path / given)


def test_a_broken_model_does_not_stop_the_others_but_the_ensembles_that_need_it(tmp_path: Path) -> None:
    write(tmp_path, "good", MODEL)
    write(tmp_path, "broken", MODEL + "nonsense: 1")
    write(tmp_path, "ensemble", ensemble(step("broken", "x", "y")))
    configuration = loaded(tmp_path)
    assert [one.name for one in configuration.models] == ["good"]
    assert "has no field 'nonsense'" in str(configuration.broken["broken"])
    assert "there is no model 'broken'" in str(configuration.broken["ensemble"])


def test_a_wrong_flag_stops_all(tmp_path: Path) -> None:
    write(tmp_path, "m", MODEL)
    flag = Override(("server", "http_port"), "x", "--http-port", Origin.FLAG)
    with pytest.raises(ConfigProblems, match="--http-port"):
        RepositoryLoader([str(tmp_path)], {}, [flag]).load()


# ---- read again ----


def test_a_model_is_read_again_from_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, "m", MODEL)
    write(tmp_path, "other", MODEL)
    repository = TritonRepository([str(tmp_path)], {}, [])
    assert repository.names() == ("m", "other")
    (before,) = repository.read("m")
    assert repository.read("m") == [before]
    (folder / "config.pbtxt").write_text(MODEL.replace("8", "4", 1))
    write(tmp_path, "m", None, 2)
    (after,) = repository.read("m")
    assert (after.version, after.max_batch_size) == (2, 4)
    (folder / "2" / "model.py").write_text("# changed")
    (changed,) = repository.read("m")
    assert changed != after


def test_a_model_is_asked_about_itself_once_for_each_state_of_its_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "models", "m", None)
    counted = tmp_path / "imports"
    says = """
import triton_python_backend_utils
open({counted!r}, "a").write("x")
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({{"name": "x", "data_type": "TYPE_FP32", "dims": [{dim}]}})
        config.add_output({{"name": "y", "data_type": "TYPE_FP32", "dims": [{dim}]}})
        return config
"""
    (folder / "1" / "model.py").write_text(says.format(counted=str(counted), dim=3))
    repository = TritonRepository([str(tmp_path / "models")], {}, [])
    (spec,) = repository.read_all().models
    assert (spec.inputs[0].shape, spec.max_batch_size, counted.read_text()) == ((3,), 0, "x")
    (folder / "1" / "model.py").write_text(says.format(counted=str(counted), dim=4))
    (spec,) = repository.read("m")
    assert (spec.inputs[0].shape, counted.read_text()) == ((4,), "xx")


def test_a_model_that_does_not_say_what_its_config_leaves_out(tmp_path: Path) -> None:
    folder = write(tmp_path, "m", 'backend: "python"')
    (folder / "1" / "model.py").write_text("class TritonPythonModel:\n    pass")
    assert problem(tmp_path).startswith("1:1: its outputs are not known, for the model does not say them: ")


def test_a_model_that_has_come_or_gone_or_broke(tmp_path: Path) -> None:
    write(tmp_path, "m", MODEL)
    repository = TritonRepository([str(tmp_path)], {}, [])
    assert repository.read("new") == ()
    write(tmp_path, "new", MODEL)
    assert [one.name for one in repository.read("new")] == ["new"]
    (tmp_path / "new" / "config.pbtxt").write_text("nonsense")
    with pytest.raises(ConfigProblems, match="has no field 'nonsense'"):
        repository.read("new")
    configuration = repository.read_all()
    assert [one.name for one in configuration.models] == ["m"]
    assert list(configuration.broken) == ["new"]
    assert repository.names() == ("m", "new")
