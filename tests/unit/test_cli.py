"""The command line: its verbs, what goes to stdout, and every exit status but those of a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import gpuserve

from gpuserve import __version__
from gpuserve.cli.app import run
from gpuserve.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from gpuserve.cli.serve_command_line import option_paths
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.repositories import CallableFlags, is_callable_path, load_callable
from gpuserve.config.schema import key_at
from gpuserve.core.errors import DeviceError, GpuserveError, StartupError
from gpuserve_worker.protocol.tensor import TensorSpec

MODEL_FILE = """\
from gpuserve import Tensor

print("printed by user code")


class Linear:
    def __init__(self, features, device="cpu"):
        raise RuntimeError("a check makes no model")

    def __call__(self, requests):
        return requests


def predict(requests):
    return requests


def bare(requests):
    return requests


predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,)), Tensor((1,), bytes, optional=True)]
predict.outputs = [Tensor(name="y", dtype="float32", shape=(-1,))]
predict.max_batch_size = 8
number = 3
"""
TALKS_FILE = """\
from gpuserve.openai import ChatRequest

class Typed:
    async def chat(self, request: ChatRequest):
        yield ""

class Untyped:
    def chat(self, request):
        return ""

typed, untyped = Typed(), Untyped()
"""
STREAMS_FILE = """\
def stream(requests):
    yield requests


async def astream(requests):
    yield requests


class Streaming:
    def __call__(self, requests):
        yield requests


"""
CONFIG = """\
models:
  - name: linear
    callable: model.py:Linear
    kwargs: {features: 30}
    inputs: [{name: x, dtype: float32, shape: [-1]}]
    outputs: [{name: y, dtype: float32, shape: [-1]}]
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a model and its config; no variable of the caller's counts."""
    monkeypatch.chdir(tmp_path)
    for name in [one for one in os.environ if one.startswith("GPUSERVE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "model.py").write_text(MODEL_FILE)
    (tmp_path / "config.yaml").write_text(CONFIG)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bench", "m", "--server", "ftp://x"), "Invalid value for --server: Invalid url 'ftp://x'"),
        (("bench", "m", "--url=ftp://x"), "Invalid value for --url: Invalid url 'ftp://x'"),
        (("bench", "m", "--server", "http://x", "--protocol", "grpc"), "grpc does not go with --server http"),
        (("bench", "m", "--url", "http://x", "--tls-ca", "x"), "--tls-ca: goes with --url grpcs://"),
        (("config", "config.yaml", "--ingress-processes", "-1"), "--ingress-processes: expected an integer"),
        (("config", "config.yaml", "--doors", "-1"), "--doors: expected an integer"),
    ],
)
def test_an_error_names_the_flag_by_the_name_that_was_given(arguments: tuple[str, ...], text: str) -> None:
    done = gpuserve(*arguments)
    assert done.status == ExitCode.USAGE
    assert text in " ".join(done.stderr.replace("│", "").split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == ExitCode.OK
    assert run(["--version"]) == ExitCode.OK
    assert run(["version", "--json"]) == ExitCode.OK
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == second == f"gpuserve {__version__}"
    assert json.loads(third)["gpuserve"] == __version__


def test_devices_are_told_where_there_are_none_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices"]) == ExitCode.OK
    assert run(["devices", "--json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    text, _, facts = out.partition("{")
    assert "NVIDIA driver" in text
    assert json.loads(f"{{{facts}")["devices"][0] == "cpu"
    assert err == ""


def test_schema_knows_every_key_of_the_server_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == ExitCode.OK
    out, err = capsys.readouterr()
    schema = json.loads(out)
    assert (schema["title"], err) == ("ConfigFile", "")

    def entry(one: dict[str, Any]) -> dict[str, Any]:
        """What is said of a key itself, of the forms that it may have the mapping."""
        forms = [one, *one.get("anyOf", ()), *one.get("allOf", ())]
        names = [form["$ref"].rpartition("/")[2] for form in forms if "$ref" in form]
        found: dict[str, Any] = schema["$defs"][names[0]] if names else one
        return found

    server = entry(schema["properties"]["server"])
    assert server["additionalProperties"] is False
    for path in option_paths():
        told = server
        for key in path:
            told = entry(told)["properties"][key]
        assert told["description"]
    assert {path[0] for path in option_paths()} == server["properties"].keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ["-h"],
        ["check", "--help"],
        *([one, "-h"] for one in ("serve", "schema", "version", "bench", "tune", "devices")),
    ],
)
def test_help_has_examples_and_exit_codes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == ExitCode.OK
    out = capsys.readouterr().out
    assert "Example" in out
    assert "<bool>" not in out
    for text in MEANINGS.values():
        assert text in out


def test_help_breaks_prose_at_the_width_of_the_terminal_and_keeps_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["serve", "--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "a callable can have attributes inputs, outputs, max_batch_size   \n and array" in out
    assert "\n   gpuserve serve model.py    " in out
    assert "``" not in out
    assert run(["bench", "--help"]) == ExitCode.OK
    assert "[default: 30s]" in capsys.readouterr().out


def test_help_of_serve_has_every_default_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["serve", "--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    for path in option_paths():
        field = key_at(("server", *path))
        assert f"GPUSERVE_SERVER__{'__'.join(path).upper()} " in out
        default = field.default if isinstance(field.default, str) else json.dumps(field.default)
        shown = default or '""'
        assert f"Default {shown}." in " ".join(out.replace("│", "").split())


def test_check_imports_in_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "config.yaml"]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert out == "linear: cpu#0\n  in   x: FP32 [-1]\n  out  y: FP32 [-1]\nconfig.yaml is valid\n"
    assert "printed by user code" in err
    assert "model" not in sys.modules


@pytest.mark.parametrize(
    ("attribute", "more"),
    [
        ("Typed", ""),
        pytest.param("Typed", "openai: true", marks=pytest.mark.thorough),
        pytest.param("typed", "", marks=pytest.mark.thorough),
        ("Untyped", "openai: true"),
        pytest.param("untyped", "openai: true", marks=pytest.mark.thorough),
    ],
)
def test_check_takes_callables_for_openai_without_a_call(tmp_path: Path, attribute: str, more: str) -> None:
    (tmp_path / "talks.py").write_text(TALKS_FILE)
    text = f"models:\n  - name: m\n    callable: talks.py:{attribute}\n    {more}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert run(["check", "config.yaml"]) == ExitCode.OK


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("stream", "generator"),
        pytest.param("Streaming", "generator", marks=pytest.mark.thorough),
        pytest.param("astream", "async", marks=pytest.mark.thorough),
    ],
)
def test_check_refuses_a_generator_for_a_model_that_is_not_decoupled(
    attribute: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "streams.py").write_text(STREAMS_FILE)
    config = CONFIG.replace("model.py:Linear", f"streams.py:{attribute}").replace(
        "    kwargs: {features: 30}\n", ""
    )
    (tmp_path / "config.yaml").write_text(config)
    assert run(["check", "config.yaml"]) == ExitCode.BAD_CONFIG
    err = capfd.readouterr().err
    assert f"'streams.py:{attribute}' is a" in err
    assert kind in err
    assert "`decoupled: true`" in err
    (tmp_path / "config.yaml").write_text(config + "    decoupled: true\n")
    assert run(["check", "config.yaml"]) == ExitCode.OK


def test_a_generator_that_is_served_by_itself_is_decoupled(tmp_path: Path) -> None:
    declared = "stream.inputs = stream.outputs = [Tensor((1,), 'FP32')]"
    (tmp_path / "streams.py").write_text(f"from gpuserve import Tensor\n{STREAMS_FILE}{declared}\n")
    (model,) = load_callable("streams.py:stream", CallableFlags(), [], {}).models
    assert model.decoupled


def test_check_does_not_print_the_token(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = "server: {restricted_endpoints: [trace], access_token: hunter2-hunter2}\n"
    config = CONFIG.replace("model.py:Linear", "model.py:predict").replace("    kwargs: {features: 30}\n", "")
    (tmp_path / "config.yaml").write_text(server + config)
    for arguments in (["check", "config.yaml"], ["check", "config.yaml", "--json"]):
        assert run(arguments) == ExitCode.OK
    out, err = capfd.readouterr()
    assert "is valid" in out
    assert "hunter2" not in out + err


def test_check_shows_all_problems(capfd: pytest.CaptureFixture[str]) -> None:
    Path("dies.py").write_text("import os\nos._exit(7)\n")
    tensors = "inputs: [{name: x, dtype: FP32, shape: []}], outputs: [{name: y, dtype: FP32, shape: []}]"
    entries = [
        "name: a, callable: 'model.py:absent'",
        "name: b, callable: 'model.py:number'",
        "name: c, callable: 'dies.py:x'",
        "name: d, callable: 'model.py:Linear', kwargs: {colour: 1}",
        "name: e, callable: 'model.py:predict', instances: [{device: 'cuda:999'}]",
    ]
    Path("config.yaml").write_text("models:\n" + "".join(f"  - {{{one}, {tensors}}}\n" for one in entries))
    assert run(["check", "config.yaml", "--json"]) == ExitCode.BAD_CONFIG
    result = json.loads(capfd.readouterr().out)
    told = [(problem["line"], problem["message"]) for problem in result["problems"]]
    expected = [
        (2, "has no attribute 'absent'"),
        (3, "is an object of type int, which cannot be called; expected a function or a class"),
        (4, "ended the process with exit status 7"),
        (5, "cannot be made with these kwargs"),
        (6, "no device 'cuda:999'"),
    ]
    assert result["ok"] is False
    for (line, message), (expected_line, part) in zip(told, expected, strict=True):
        assert line == expected_line
        assert part in message


@pytest.mark.parametrize("verb", ["check", "serve"])
def test_an_absent_device(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(CONFIG + "    instances: [{device: 'cuda:999'}]\n")
    assert run([verb, "config.yaml"]) == ExitCode.NO_SUCH_DEVICE
    err = capfd.readouterr().err
    assert "config.yaml:7:26: model 'linear': this machine has no device 'cuda:999', only cpu" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigProblems([]), ExitCode.USAGE),
        (StartupError("x"), ExitCode.STARTUP_FAILURE),
        (DeviceError("x"), ExitCode.NO_SUCH_DEVICE),
        (GpuserveError("x"), ExitCode.RUNTIME_FAILURE),
    ],
)
def test_errors_have_exit_codes(error: GpuserveError, code: ExitCode) -> None:
    assert exit_code_of(error) == code


def test_the_module_is_the_script() -> None:
    command = [sys.executable, "-m", "gpuserve", "check", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_CONFIG, "")
    assert done.stderr == "absent.yaml: cannot be read: no such file or directory\n"


def test_the_command_line_imports_no_server_parts() -> None:
    program = "import sys, gpuserve.cli.app as a; a.build_app(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "gpuserve.cli.serve_command" in loaded
    assert not loaded & {"rich", "grpc", "zmq", "asyncio", "gpuserve.supervisor.supervisor"}


def test_a_callable_declares_itself() -> None:
    configuration = load_callable("model.py:predict", CallableFlags(), [], {})
    (model,) = configuration.models
    assert (model.name, model.max_batch_size) == ("predict", 8)
    assert model.inputs == (TensorSpec("x", "FP32", (-1,)), TensorSpec("INPUT_2", "BYTES", (1,), True))
    assert model.outputs == (TensorSpec("y", "FP32", (-1,)),)
    source = {"path": "model.py:predict", "base_dir": os.getcwd(), "kwargs": {}}
    assert model.instances[0].source == source


def test_a_callable_declares_where_its_inputs_lie(tmp_path: Path) -> None:
    tensors = "[Tensor(name='x', dtype='FP32', shape=(1,), memory='gpu'), Tensor((1,), 'FP32')]"
    lines = [
        "from gpuserve import Tensor",
        "def plain(requests): ...",
        f"plain.inputs, plain.outputs = {tensors}, []",
        "def torchy(requests): ...",
        "vars(torchy).update(vars(plain), array='torch')",
    ]
    (tmp_path / "gpu.py").write_text("\n".join(lines))
    for name, array, other in (("plain", "cupy", "cpu"), ("torchy", "torch", "gpu")):
        flags = CallableFlags(devices=["cuda:0"])
        (spec,) = load_callable(f"{tmp_path}/gpu.py:{name}", flags, [], {}).models
        assert (spec.array, [one.memory for one in spec.inputs]) == (array, ["gpu", other])
    with pytest.raises(ConfigProblems, match="CuPy arrays as inputs need a GPU"):
        load_callable(f"{tmp_path}/gpu.py:plain", CallableFlags(), [], {})


def test_flags_describe_a_callable() -> None:
    flags = CallableFlags("m", ["a:b:FP16:2,-1", "n:int8:"], ["o:bytes:1"], 4, ["cuda:0", "cpu"], 2)
    (model,) = load_callable("model.py:Linear", flags, [], {"GPUSERVE_MODELS__LINEAR__VERSION": "3"}).models
    assert model.inputs == (TensorSpec("a:b", "FP16", (2, -1)), TensorSpec("n", "INT8", ()))
    assert model.outputs == (TensorSpec("o", "BYTES", (1,)),)
    assert (model.name, model.max_batch_size, model.version) == ("m", 4, 3)
    assert [one.name for one in model.instances] == ["cuda:0#0", "cuda:0#1", "cpu#0", "cpu#1"]


@pytest.mark.parametrize(
    ("target", "known"),
    [("model.py:f", True), ("pkg.mod:C.f", True), ("config.yaml", False), ("a/b.py:f", True), ("x", False)],
)
def test_which_targets_are_callables(target: str, known: bool) -> None:
    assert is_callable_path(target) is known
