"""A whole configuration: files to settings and models, and every mistake told at its place."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent

import pytest
from case_tables import cases
from config_file import load_text, problems_of

from gpuserve.config.entries import MISSING, UNEXPECTED, UNKNOWN, Mistake
from gpuserve.config.load import load_data, load_file
from gpuserve.config.precedence import Override
from gpuserve.config.problems import ConfigProblems, Origin, describe
from gpuserve.config.repositories import FileRepository
from gpuserve.config.schema import ConfigFile, ServerEntry, json_schema
from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.options import declared
from gpuserve.model.spec import BatchingSpec, QueueSpec
from gpuserve_worker.protocol.tensor import TensorSpec

WHOLE = """\
server:
  http_port: 9000
  metrics_port: null
  drain_timeout_s: 5
models:
  - name: linear
    callable: linear.py:Linear
    kwargs: {features: 30}
    instances:
      - {device: "cuda:0", count: 2}
      - {device: cpu}
    inputs:  [{name: x, dtype: float32, shape: [-1]}, {name: s, dtype: bytes, shape: [], optional: true}]
    outputs: [{name: y, dtype: FP32, shape: [-1]}]
    max_batch_size: 64
    batching: {max_queue_delay_us: 100, preferred_batch_sizes: [8, 64]}
    queue: {max_requests: 10}
"""
MODEL = """\
  - name: m
    callable: pkg.mod:f
    inputs: [{name: x, dtype: FP32, shape: [1]}]
    outputs: [{name: y, dtype: FP32, shape: [1]}]
"""


@pytest.fixture(autouse=True)
def _file_of_the_callable(tmp_path: Path) -> None:
    (tmp_path / "linear.py").touch()


def test_a_whole_file_becomes_settings_and_models(tmp_path: Path) -> None:
    configuration = load_text(tmp_path, WHOLE)
    assert configuration.settings == ServerSettings(http_port=9000, metrics_port=None, drain_timeout_s=5)
    (model,) = configuration.models
    assert model.inputs == (TensorSpec("x", "FP32", (-1,)), TensorSpec("s", "BYTES", (), True))
    assert model.outputs == (TensorSpec("y", "FP32", (-1,)),)
    assert model.batching == BatchingSpec(100, (8, 64))
    assert model.queue == QueueSpec(max_requests=10)
    assert (model.max_batch_size, model.prefetch) == (64, 1)
    assert [one.name for one in model.instances] == ["cuda:0#0", "cuda:0#1", "cpu#0"]
    source = {"path": "linear.py:Linear", "base_dir": str(tmp_path), "kwargs": {"features": 30}}
    assert model.instances[0].source == source


def test_defaults_are_those_of_the_run_time_classes(tmp_path: Path) -> None:
    configuration = load_text(tmp_path, f"models:\n{MODEL}")
    assert configuration.settings == ServerSettings()
    assert declared(ServerSettings, ServerEntry({}).plain()) == ServerSettings()
    (model,) = configuration.models
    assert (model.max_batch_size, model.prefetch, model.version) == (0, 0, 1)
    assert (model.batching, model.queue) == (BatchingSpec(), QueueSpec())
    assert [(one.name, one.device) for one in model.instances] == [("cpu#0", "cpu")]


def test_numbering_of_instances_continues_per_device(tmp_path: Path) -> None:
    devices = "    instances: [{device: cpu}, {device: 'cuda:1'}, {device: cpu, count: 2}]\n"
    (model,) = load_text(tmp_path, f"models:\n{MODEL}{devices}").models
    assert [one.name for one in model.instances] == ["cpu#0", "cuda:1#0", "cpu#1", "cpu#2"]


def test_an_unknown_key_is_shown_with_a_caret_and_the_nearest_one(tmp_path: Path) -> None:
    told = problems_of(tmp_path, f"models:\n{MODEL}    max_batch_size: 4\n    batching: {{max_dealy: 2}}\n")
    assert told == [
        "config.yaml:7:16: unknown key 'max_dealy' in models[0].batching; "
        "did you mean 'max_queue_delay_us', in microseconds?\n"
        "  7 |     batching: {max_dealy: 2}\n"
        "    |                ^^^^^^^^^"
    ]


def test_every_mistake_is_told_at_once_in_reading_order(tmp_path: Path) -> None:
    text = (
        'server: {http_port: "80", grpc_port: 8002}\n'
        "models:\n"
        "  - name: m\n"
        "    callable: linear\n"
        "    inputs: [{name: x, dtype: float3, shape: [-2]}]\n"
        "    name: n\n"
        "    instances: [{device: gpu0, count: 0}]\n"
        "modles: 1\n"
    )
    heads = [told.splitlines()[0].removeprefix("config.yaml:") for told in problems_of(tmp_path, text)]
    assert heads == [
        "1:21: server.http_port: expected an integer from 0 to 65535, given the string '80'",
        "1:38: port 8002 is already that of metrics_port (its default); give grpc_port another",
        "4:15: models[0].callable: expected 'file.py:attribute', 'package.module:attribute', a model file "
        "such as 'model.onnx' or a folder such as './model', given 'linear'",
        "5:31: models[0].inputs[0].dtype: expected a dtype such as 'float32', 'FP32' or 'bytes', "
        "given 'float3'; did you mean 'float32'?",
        "5:47: models[0].inputs[0].shape[0]: expected an integer of at least -1, given the number -2",
        "6:5: key 'name' is already given in line 3",
        "7:26: models[0].instances[0].device: expected 'cpu', 'auto', 'cuda:0', 'cuda:1', …, "
        "'cuda:*' for every GPU, or a UUID (GPU-… or MIG-…), given 'gpu0'; did you mean 'cuda:0'?",
        "7:39: models[0].instances[0].count: expected an integer from 1 to 256, given the number 0",
        "8:1: unknown key 'modles' at the top level; did you mean 'models'?",
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    cases(f"""\
max_batch_size: true
-> models[0].max_batch_size: expected an integer of at least 0, given true
max_batch_size: 1.5
-> models[0].max_batch_size: expected an integer of at least 0, given the number 1.5
max_batch_size: -1
-> models[0].max_batch_size: expected an integer of at least 0, given the number -1
strict: 1
-> models[0].strict: expected true or false, given the number 1
queue:
-> models[0].queue: expected a mapping, given null
instances: []
-> models[0].instances: expected at least one entry, given an empty list
instances: cpu
-> models[0].instances: expected a list, given the string 'cpu'
kwargs: [1]
-> models[0].kwargs: expected a mapping, given a list of 1
kwargs: {{seed: {2**64}}}
-> models[0].kwargs: expected integers of at most 64 bits, given {2**64}
prefetch: 99
-> models[0].prefetch: expected an integer from 0 to 16, given the number 99
version: 0
-> models[0].version: expected an integer of at least 1, given the number 0
batching: {{preferred_batch_sizes: [2]}}
-> has no effect without a max_batch_size
batching: {{max_queue_delay_us: 2}}
-> has no effect without a max_batch_size
max_batch_size: 4
batching: {{preferred_batch_sizes: [4, 5]}}
-> which is 4, given 5
max_batch_size: 4
batching: {{preferred_batch_sizes: [0]}}
-> at least 1, given the number 0
"""),
)
def test_wrong_values(tmp_path: Path, keys: str, told: str) -> None:
    (only,) = problems_of(tmp_path, f"models:\n{MODEL}{indent(keys, '    ')}\n")
    head = only.splitlines()[0]
    assert head.endswith(f": {told}") if told.startswith("models[0]") else told in head


def test_names_are_unique(tmp_path: Path) -> None:
    twice = MODEL.replace("name: m", "name: M").replace(
        "[{name: y,", "[{name: y, dtype: FP32, shape: [1]}, {name: y,"
    )
    told = problems_of(tmp_path, f"models:\n{MODEL}{twice}")
    assert "'M' is already declared in models[0] as 'm': names must differ in more than case" in told[0]
    assert "tensor 'y' is already declared in outputs[0]" in told[1]


@pytest.mark.parametrize("name", ["../x", "a b", "", "-a", "x" * 129])
def test_bad_model_names(tmp_path: Path, name: str) -> None:
    (only,) = problems_of(tmp_path, f"models:\n{MODEL}".replace("name: m", f"name: '{name}'"))
    assert only.startswith("config.yaml:2:11: models[0].name: Model name")


def test_a_callable_whose_file_is_not_there(tmp_path: Path) -> None:
    (only,) = problems_of(tmp_path, f"models:\n{MODEL}".replace("pkg.mod:f", "absent.py:f"))
    assert "models[0].callable: there is no file 'absent.py'" in only


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "missing key 'models' at the top level"),
        ("[]", "expected a mapping, given an empty list"),
        ("models: []", "models: expected at least one entry, given an empty list"),
        ("models: [", "not valid YAML"),
        ("models: [\n  {name: &a [*a]}]", "an alias cannot stand inside"),
        ("\N{SNOWMAN}: {", "not valid YAML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, told: str) -> None:
    assert any(told in one for one in problems_of(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    for name, told in (("absent.yaml", "no such file"), (".", "is a directory"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ConfigProblems, match=told):
            load_file(str(tmp_path / name), {})


def test_a_long_line_is_cut_around_the_mistake(tmp_path: Path) -> None:
    (long,) = problems_of(tmp_path, f"models:\n{MODEL}    queue: {{{' ' * 300}xx: 1}}\n")
    _, source, caret = long.splitlines()
    assert len(source) < 120
    assert source[caret.index("^") : caret.rindex("^") + 1] == "xx"


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    environ = {
        "GPUSERVE_SERVER__HTTP_PORT": "9100",
        "GPUSERVE_SERVER__GRPC_PORT": "null",
        "GPUSERVE_SERVER__NAME": "12",
        "GPUSERVE_MODELS__LINEAR__MAX_BATCH_SIZE": "128",
        "GPUSERVE_MODELS__LINEAR__BATCHING__PREFERRED_BATCH_SIZES": "[16]",
        "GPUSERVE_MODELS__LINEAR__KWARGS__FEATURES": "31",
        "PATH": "/bin",
    }
    configuration = load_text(tmp_path, WHOLE, environ)
    settings, (model,) = configuration.settings, configuration.models
    assert (settings.http_port, settings.grpc_port, settings.name) == (9100, None, "12")
    assert (model.max_batch_size, model.batching) == (128, BatchingSpec(100, (16,)))
    assert model.instances[0].source["kwargs"] == {"features": 31}


def test_a_flag_overrides_the_environment() -> None:
    model = {"name": "m", "callable": "a:b", "inputs": [], "outputs": []}
    flag = Override(("server", "http_port"), 1, "--http-port", Origin.FLAG)
    tensor = [{"name": "x", "dtype": "FP32", "shape": []}]
    data = {"server": {"http_port": 3}, "models": [{**model, "inputs": tensor, "outputs": tensor}]}
    environ = {"GPUSERVE_SERVER__HTTP_PORT": "2"}
    assert load_data(data, "a:b", "/", {}).settings.http_port == 3
    assert load_data(data, "a:b", "/", environ).settings.http_port == 2
    assert load_data(data, "a:b", "/", environ, [flag]).settings.http_port == 1


@pytest.mark.parametrize(
    ("variable", "told"),
    cases("""\
GPUSERVE_SERVER__HTTP_PRT=1
-> unknown variable; did you mean 'GPUSERVE_SERVER__HTTP_PORT'?
GPUSERVE_SERVER_HTTP_PORT=1
-> unknown variable; did you mean 'GPUSERVE_SERVER__HTTP_PORT'?
GPUSERVE_SERVER__HTTP_PORT=x
-> expected an integer from 0 to 65535, given the string 'x'
GPUSERVE_SERVER__HTTP_PORT=70000
-> expected an integer from 0 to 65535, given the number 70000
GPUSERVE_SERVER__LOG_FORMAT=xml
-> expected one of 'text' or 'json', given the string 'xml'
GPUSERVE_MODELS__OTHER__VERSION=1
-> no model has this name; the models are LINEAR
GPUSERVE_MODELS__LINEAR__VERSON=1
-> unknown key 'verson' of the model 'linear'; did you mean 'version'?
GPUSERVE_MODELS__LINEAR__QUEUE__X=1
-> unknown key 'x' of the model 'linear'
GPUSERVE_MODELS__LINEAR__QUEUE=[1
-> expected a mapping, given the string '[1'
"""),
)
def test_wrong_variables_are_named(tmp_path: Path, variable: str, told: str) -> None:
    name, _, value = variable.partition("=")
    (only,) = problems_of(tmp_path, WHOLE, {name: value})
    assert only.startswith(f"{name}: {told}")


def test_a_variable_that_could_mean_two_models(tmp_path: Path) -> None:
    text = "models:\n" + MODEL.replace("name: m", "name: a-b") + MODEL.replace("name: m", "name: a.b")
    (only,) = problems_of(tmp_path, text, {"GPUSERVE_MODELS__A_B__VERSION": "2"})
    assert "could mean any of the models a-b, a.b" in only


def test_the_links_that_kubernetes_sets_for_a_service_are_no_settings(tmp_path: Path) -> None:
    environ = {
        "GPUSERVE_SERVICE_HOST": "10.0.0.1",
        "GPUSERVE_SERVICE_PORT_HTTP": "8000",
        "GPUSERVE_PORT": "tcp://10.0.0.1:8000",
        "GPUSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "GPUSERVE_SERVER_PORT": "tcp://10.0.0.1:8000",
    }
    assert load_text(tmp_path, WHOLE, environ).settings.http_port == 9000


def test_problems_of_flags_alone_are_known_as_such() -> None:
    flag = Override(("server", "http_port"), "x", "--http-port", Origin.FLAG)
    with pytest.raises(ConfigProblems) as caught:
        load_data({"models": [{"name": "m"}]}, "m", "/", {}, [flag])
    assert not caught.value.only_flags
    assert [problem.origin for problem in caught.value.problems].count(Origin.FLAG) == 1


def test_describe_is_short() -> None:
    assert describe({}) == "a mapping"
    assert describe(1.5) == "the number 1.5"
    assert len(describe("x" * 10_000)) < 120


def test_json_schema_is_generated_and_complete() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["required"] == ["models"]
    assert schema["additionalProperties"] is False
    server = schema["$defs"]["ServerEntry"]["properties"]
    assert server["http_port"]["default"] == ServerSettings().http_port
    for name, definition in schema["$defs"].items():
        for key, field in definition["properties"].items():
            assert field.get("description"), f"{name}.{key} has no description"


def test_the_schema_is_strict_everywhere() -> None:
    for entry in json_schema()["$defs"].values():
        assert entry["additionalProperties"] is False
    found: list[Mistake] = []
    ConfigFile.read({"models": [{"nme": "m"}], "server": {"http_port": "80", "admin_api": 1}}, (), found)
    assert [(one.path, one.kind) for one in found] == [
        (("models", 0, "nme"), UNKNOWN),
        (("models", 0, "name"), MISSING),
        (("server", "http_port"), UNEXPECTED),
        (("server", "admin_api"), UNEXPECTED),
    ]


def test_several_versions_of_a_model(tmp_path: Path) -> None:
    second = MODEL.rstrip("\n") + "\n    version: 2\n"
    environ = {"GPUSERVE_MODELS__M__PREFETCH": "3"}
    models = load_text(tmp_path, f"models:\n{MODEL}{second}", environ).models
    assert [(one.name, one.version, one.prefetch) for one in models] == [("m", 1, 3), ("m", 2, 3)]
    (only,) = problems_of(tmp_path, f"models:\n{MODEL}{second}{second}")
    assert "'m' is already declared in models[1]; another entry of this name needs another version" in only


def test_the_models_of_the_start(tmp_path: Path) -> None:
    text = f"server: {{model_control: explicit, load_at_start: [m]}}\nmodels:\n{MODEL}"
    settings = load_text(tmp_path, text).settings
    assert (settings.model_control, settings.load_at_start) == ("explicit", ("m",))
    for old, new, told in (
        ("[m]", "[m, x]", "names 'x', which is no model of this server"),
        ("explicit", "none", "load_at_start needs model_control: explicit"),
    ):
        assert told in problems_of(tmp_path, text.replace(old, new))[0]


def test_a_config_file_is_a_repository(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"models:\n{MODEL}")
    environ = {"GPUSERVE_MODELS__M__PREFETCH": "3"}
    repository = FileRepository(str(path), environ, [], load_file(str(path), environ))
    assert repository.names() == ("m",)
    path.write_text(f"models:\n{MODEL}{MODEL.replace('name: m', 'name: n')}")
    assert [(one.name, one.prefetch) for one in repository.read("m")] == [("m", 3)]
    assert (repository.names(), repository.read("absent")) == (("m", "n"), [])
    path.write_text("models: [")
    with pytest.raises(ConfigProblems):
        repository.read("m")
    assert repository.names() == ("m", "n")


def test_instances_may_be_a_number_of_processes_on_the_cpu() -> None:
    model = {"name": "m", "callable": "pkg.mod:f", "inputs": [], "outputs": [], "instances": 2}
    (made,) = load_data({"models": [model]}, "c.yaml", ".", {}).models
    assert [one.name for one in made.instances] == ["cpu#0", "cpu#1"]
    for wrong in (0, 257, True, 1.5):
        with pytest.raises(ConfigProblems, match=r"models\[0\]\.instances: expected"):
            load_data({"models": [{**model, "instances": wrong}]}, "c.yaml", ".", {})
