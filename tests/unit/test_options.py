"""Options are said once: the same rows make the keys of a file, what programs write, and what clients see."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuserve
from gpuserve import ModelConfig, Server, Tensor
from gpuserve.api.binding import model_spec
from gpuserve.cli.bench.tune.tune_output import config_with_values
from gpuserve.config.entries import entry_class_of
from gpuserve.config.load import load_data, load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.schema import mapping_schema
from gpuserve.config.settings.server import ServerSettings, TraceSettings
from gpuserve.core.errors import BadModelConfig, ConfigError
from gpuserve.model import Batching, ModelWarmup, Policy, Queue, SequenceBatching, WarmupInput
from gpuserve.model.declaration import DynamicBatcher, QueuePolicy
from gpuserve.model.options import declared, option, required, rows
from gpuserve.model.spec import BatchingSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve.model.triton_config import fill, options_of

X = Tensor((1,), "FP32", "x")
FILE = """\
models:
  - name: m
    callable: pkg.mod:f
    inputs: [{name: x, dtype: FP32, shape: [1]}]
    outputs: [{name: y, dtype: FP32, shape: [1]}]
    max_batch_size: 8
    batching: {max_queue_delay_microseconds: 500, preferred_batch_size: [4]}
    queue:
      priority_levels: 2
      default_priority_level: 1
      priority_queue_policy: {2: {max_queue_size: 3, default_timeout_microseconds: 9}}
"""


def bound(**config: Any) -> ModelSpec:
    return model_spec("m", len, [X], [X], 1, ModelConfig(**config), False, "thread")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of its own."""

    name: str = required("What it is called.", some=True)
    count: int = option(1, "How many.", least=1, most=9, triton="num")
    mode: str | None = option(None, "How.", words=("slow", "fast"))
    sizes: tuple[int, ...] = option((), "How large.", least=2)


def test_a_row_is_a_key_with_its_schema_and_what_a_program_may_say() -> None:
    schema = mapping_schema(entry_class_of(Table))
    assert schema["required"] == ["name"]
    count = {"type": "integer", "minimum": 1, "maximum": 9, "default": 1}
    assert schema["properties"]["count"] == {"title": "Count", "description": "How many.", **count}
    mode = [{"enum": ["slow", "fast"], "type": "string"}, {"type": "null"}]
    assert schema["properties"]["mode"]["anyOf"] == mode
    assert schema["properties"]["sizes"]["items"] == {"minimum": 2, "type": "integer"}
    assert declared(Table, {"name": "a", "num": 3, "sizes": [2]}) == Table("a", 3, None, (2,))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "name is missing"),
        ({"name": ""}, "name must be a non-empty string, got ''"),
        ({"name": "a", "num": 10}, "num must be an integer from 1 to 9, got 10"),
        ({"name": "a", "count": True}, "count must be an integer from 1 to 9, got True"),
        ({"name": "a", "mode": "idle"}, "mode must be one of 'slow' or 'fast', got 'idle'"),
        ({"name": "a", "sizes": [1]}, r"sizes must be a list of integers of at least 2, got \[1\]"),
        (3, "t must be a Table, got an object of type int"),
    ],
)
def test_a_value_that_cannot_be_is_told_by_the_name_that_it_was_given_by(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        declared(Table, given, "t.")


@pytest.mark.parametrize(
    "table", [ModelSpec, BatchingSpec, QueueSpec, PolicySpec, ServerSettings, TraceSettings]
)
def test_every_option_is_described(table: type) -> None:
    texts = [row.option.description for row in rows(table).values()]
    assert texts
    assert all(text.endswith(".") and len(text) > 15 for text in texts)
    if table in {ServerSettings, TraceSettings}:
        assert list(rows(table)) == [one.name for one in dataclasses.fields(table)]


def loaded(tmp_path: Path, text: str) -> list[ModelSpec]:
    (tmp_path / "c.yaml").write_text(text)
    return list(load_file(str(tmp_path / "c.yaml"), {}).models)


def test_a_file_may_have_tritons_names(tmp_path: Path) -> None:
    (model,) = loaded(tmp_path, FILE)
    assert model.batching == BatchingSpec(500, (4,))
    policy = PolicySpec(max_requests=3, default_timeout_us=9)
    assert model.queue == QueueSpec(priority_levels=2, default_priority=1, policies=((2, policy),))
    path = ("models", 0, "batching", "max_queue_delay_us")
    assert "max_queue_delay_microseconds: 7," in config_with_values(FILE, {path: 7})


def test_both_names_of_an_option_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblems) as told:
        loaded(tmp_path, FILE.replace("{max_queue_delay_mic", "{max_queue_delay_us: 1, max_queue_delay_mic"))
    (problem,) = told.value.problems
    assert "key 'max_queue_delay_us' is already given in line 7" in problem.message
    assert problem.span is not None
    assert problem.source_line[problem.span.column - 1 :].startswith("max_queue_delay_microseconds")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('server: {"http\\u005fport": x}\nmodels: []\n', r"1:28: server.http_port: expected"),
        (FILE.replace("500", "-1"), r"7:46: models\[0\].batching.max_queue_delay_microseconds: expected"),
    ],
)
def test_a_mistake_is_shown_in_its_place_by_the_name_of_the_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigProblems, match=rf"c.yaml:{told}"):
        loaded(tmp_path, text)


def test_a_program_may_have_the_names_of_a_file() -> None:
    policy = Policy("delay", 5)
    spec = bound(
        batching=Batching(max_queue_delay_us=9, merge=True), queue=Queue(max_requests=3, policy=policy)
    )
    batcher = DynamicBatcher(9, default_queue_policy=QueuePolicy(default_timeout_microseconds=5))
    assert spec.batching == bound(batcher=batcher).batching
    assert spec.queue == QueueSpec(max_requests=3, policy=policy)
    more = bound(prefetch=2, read_only_inputs=True, retry_on_worker_death=False)
    assert bound(execution_timeout_s="1m30s").execution_timeout_s == 90.0
    assert (more.prefetch, more.read_only_inputs, more.retry_on_worker_death) == (2, True, False)


def test_a_program_may_have_tritons_names() -> None:
    old: dict[str, Any] = {"max_sequence_idle_microseconds": 5}
    assert SequenceBatching(**old) == SequenceBatching(max_sequence_idle_us=5)
    with pytest.raises(TypeError, match="an option of SequenceBatching is given by both of its names"):
        SequenceBatching(max_sequence_idle_us=5, **old)
    warmed = [ModelWarmup("w", inputs={"x": WarmupInput(values="zero")})]
    assert bound(model_warmup=warmed).warmup == (("w", 1, 1, (("x", "FP32", (1,), "zero", ""),)),)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"queue": Queue(max_requests=0)}, "queue.max_requests must be an integer of at least 1, got 0"),
        ({"batching": Batching(preferred_batch_sizes=(9,))}, "at most max_batch_size, which is 4, given 9"),
        (
            {"queue": Queue(), "batcher": DynamicBatcher(priority_levels=1, default_priority_level=1)},
            "by queue or by batcher, not by both",
        ),
        ({"prefetch": 99}, "prefetch must be an integer from 0 to 16, got 99"),
    ],
)
def test_what_a_program_cannot_say(config: dict[str, Any], text: str) -> None:
    with pytest.raises(BadModelConfig, match=text):
        bound(**config)


def test_settings_are_checked_by_the_same_rows_and_a_misspelt_option_is_named() -> None:
    with pytest.raises(ConfigError, match="http_port must be an integer from 0 to 65535, got 70000"):
        Server(http_port=70000)
    with pytest.raises(ConfigError, match=r"trace\.url: expected a URL"):
        Server(trace=TraceSettings(url="collector"))
    with pytest.raises(TypeError, match="aray"):
        ModelConfig(aray="cupy")


def test_a_message_of_triton_is_filled_and_read_by_the_same_rows() -> None:
    from tritonclient.grpc import model_config_pb2 as pb

    batching, policies = BatchingSpec(7, (2,), True, True), ((2, PolicySpec("delay", 5, True, 6)),)
    queue = QueueSpec(priority_levels=2, default_priority=1, policies=policies)
    message = pb.ModelDynamicBatching()
    fill(message, batching)
    fill(message, queue)
    said = options_of(message, BatchingSpec) | options_of(message, QueueSpec)
    assert declared(BatchingSpec, said) == batching
    assert declared(QueueSpec, said) == queue


PROGRAM = """\
from gpuserve.model.declaration import ModelConfig

config = ModelConfig(True, 4, array=None, prefetch=None, read_only_inputs=True)
config.array = "cupy"
config.read_only_inputs = False
ModelConfig(aray="cupy")  # wrong
ModelConfig(read_only_inputs="yes")  # wrong
ModelConfig(prefetch="many")  # wrong
ModelConfig(batchng=False)  # wrong
config.prefech = 1  # wrong
"""


def test_type_checkers_know_the_options_of_a_config(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    read = ("model/declaration.py", "model/spec.py", "model/options.py")
    files = [str(program), *(str(Path(gpuserve.__file__).parent / one) for one in read)]
    options = ["--strict", "--follow-imports=skip", "--config-file=", f"--cache-dir={tmp_path}/cache"]
    command = [sys.executable, "-m", "mypy", *options, *files]
    folder = Path(gpuserve.__file__).parents[1]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, timeout=120)
    found = re.findall(r"program\.py:(\d+): error", done.stdout)
    lines = enumerate(PROGRAM.splitlines(), start=1)
    assert [int(one) for one in found] == [n for n, line in lines if "# wrong" in line], done.stdout


def test_triton_names_are_attributes_too() -> None:
    warmup: Any = WarmupInput(np.float32, (1,), input_data_file="a.npy")
    assert warmup.input_data_file == "a.npy"
    warmup.input_data_file = "b.npy"
    assert warmup.file == "b.npy"
    sequences: Any = SequenceBatching(max_sequence_idle_us=7)
    assert sequences.max_sequence_idle_microseconds == 7


BAD_VALUES = [
    *(("strict", value, "true or false") for value in ("maybe", 1)),
    ("decoupled", 1, "true or false"),
    ("response_cache", "yes", "true or false"),
    ("read_only_inputs", 0, "true or false"),
    ("retry_on_worker_death", "no", "true or false"),
    *(("max_batch_size", value, "an integer of at least 0") for value in (-1, 1.5, True, "8")),
    ("max_batch_size", 1 << 64, "an integer of at most 64 bits"),
    ("version", 0, "an integer of at least 1"),
    ("version", "1", "an integer of at least 1"),
    ("concurrency", 0, "an integer from 1 to 4096"),
    ("concurrency", 5000, "an integer from 1 to 4096"),
    ("prefetch", 17, "an integer from 0 to 16"),
    ("prefetch", 0.5, "an integer from 0 to 16"),
    ("execution_timeout_s", -1, "a number of at least 0"),
    ("execution_timeout_s", float("inf"), "a finite number"),
    ("execution_timeout_s", "soon", "a number of seconds or a time such as 500ms, 10s, 1m30s or 2h"),
    ("array", "jax", "one of 'numpy', 'cupy' or 'torch'"),
    ("on_unrecoverable", "exit", "one of 'shutdown' or 'restart_worker'"),
]
#: Options that are arguments of ``bind()``, by their names there.
ARGUMENTS = {"strict": "strict", "version": "model_version", "concurrency": "concurrency"}
ARGUMENTS["on_unrecoverable"] = "on_unrecoverable"


@pytest.mark.parametrize(("name", "value", "expected"), BAD_VALUES)
def test_programs_and_files_are_checked_alike(name: str, value: Any, expected: str) -> None:
    arguments = {"model_version": 1, "strict": True, "isolation": "thread", "config": ModelConfig()}
    arguments |= {ARGUMENTS[name]: value} if name in ARGUMENTS else {"config": ModelConfig(**{name: value})}
    with pytest.raises(BadModelConfig) as by_program:
        model_spec("m", len, [X], [X], **arguments)  # type: ignore[arg-type]
    assert str(by_program.value) == f"{ARGUMENTS.get(name, name)} must be {expected}, got {value!r}"
    tensors = [{"name": "x", "dtype": "FP32", "shape": [1]}]
    model = {"name": "m", "callable": "pkg.mod:f", "inputs": tensors, "outputs": tensors, name: value}
    with pytest.raises(ConfigProblems) as by_file:
        load_data({"models": [model]}, "config.yaml", ".", {})
    assert f"models[0].{name}: expected {expected}, given" in str(by_file.value)
