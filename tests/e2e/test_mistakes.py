"""What people do wrong, one row each: the one sentence that they are told (what was wrong, what was expected,
what was given), and the exit status. Nobody sees a traceback but of a file of their own.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from processes import finished
from serving import GPUSERVE, Addresses

from gpuserve.cli.app import run
from gpuserve.cli.exit_codes import ExitCode

CONFIG = "models: [{name: m, callable: 'raises.py:Raises', inputs: [], outputs: []}]\n"
FILES = {
    "m.py": "number = 3\n\n\ndef f(x):\n    return x\n\n\ndef g(x):\n    return x\n",
    "none.py": "import os\n",
    "syntax.py": "def f(:\n",
    "imports.py": "import no_such_module\n\n\ndef f(x):\n    return x\n",
    "made.py": "class Made:\n    def __init__(self, size):\n        self.size = size\n",
    "raises.py": "class Raises:\n    def __init__(self):\n        raise ValueError('no weights')\n",
    "nocall.py": "class Quiet:\n    pass\n",
    "named.py": (
        "from gpuserve.decorators import batch\n\n\n@batch\ndef f(image):\n    return image\n\n\n"
        "def two(a, b):\n    return a\n"
    ),
    "sized.py": (
        "class Sized:\n    def __init__(self, size):\n        self.size = size\n\n"
        "    def __call__(self, requests):\n        return requests\n"
    ),
    "notes.txt": "def f(x):\n    return x\n",
    "empty.yaml": "",
}


class WrongRequest(NamedTuple):
    """What is sent over HTTP to a server that has the model echo_FP32, and what comes of it."""

    name: str
    path: str
    sent: str
    status: int
    text: str


class Mistake(NamedTuple):
    """A command line, the config that it is about (``c.yaml``), and what comes of it."""

    name: str
    line: str
    code: int
    told: str
    config: str = ""


TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
MISTAKES = [Mistake(**row) for row in TABLE["commands"]]
REQUESTS = [WrongRequest(**row) for row in TABLE["requests"]]


def _often(mistakes: Sequence[Mistake]) -> list[Any]:
    """Each fourth of them always, the others when thorough."""
    marks = [(), *[pytest.mark.thorough] * 3]
    return [pytest.param(one, id=one.name, marks=marks[at % 4]) for at, one in enumerate(mistakes)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.yaml").write_bytes("models: [é]".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    return tmp_path


def told(text: str, folder: Path) -> str:
    """What is told besides usage, excerpts of a config, and the traceback of a file of the user's own."""
    frames = re.findall(r'^ *File "([^"]+)"', text, re.MULTILINE)
    assert all(Path(one).parent == folder or one.startswith("<frozen") for one in frames), text
    text = re.sub(r"^(Traceback \(most|  File ).*?\n(?! )[^\n]*\n", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip("│╭╮╰╯─ ") for line in text.splitlines()]
    idle = re.compile(r"Usage: .*|Try '.*|Error|(\d+)? *\|.*|")
    return " ".join(line for line in lines if not idle.fullmatch(line))


@pytest.mark.parametrize("mistake", _often(MISTAKES))
def test_a_mistake_is_told_in_one_sentence(
    mistake: Mistake, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if mistake.config:
        (folder / "c.yaml").write_text(mistake.config)
    assert run(mistake.line.split()) == mistake.code
    out, err = capfd.readouterr()
    assert re.fullmatch(mistake.told, told(err, folder)), told(err, folder)
    assert out == ""


@pytest.mark.thorough
def test_a_port_that_is_taken_and_a_model_that_raises(folder: Path) -> None:
    (folder / "raises.py").write_text(
        "class Raises:\n    def __init__(self):\n        raise ValueError('no weights')\n\n"
        "    def __call__(self, requests):\n        return requests\n"
    )
    (folder / "c.yaml").write_text(CONFIG)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = served("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
        assert code == ExitCode.STARTUP_FAILURE
        assert re.fullmatch(rf".*{port}.*in use.*", err.splitlines()[-1]), err
    code, err = served("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    assert code == ExitCode.STARTUP_FAILURE
    whole = "model 'm': instance cpu#0 could not be started: raises.py:Raises raised ValueError: no weights"
    assert err.splitlines()[-1] == whole
    assert (err.count("ValueError: no weights"), err.count("Traceback")) == (2, 1)
    assert "starts again" not in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            "callable: 'named.py:f'",
            "'named.py:f' below @batch is called with the declared inputs by name ('x'), but no "
            "parameter takes 'x'",
        ),
        (
            "callable: 'named.py:two'",
            "'named.py:two' is called with one argument, a list of requests, but the call fails: missing a "
            "required argument: 'b'; @batch passes each input as an argument",
        ),
        (
            "callable: 'sized.py:Sized', kwargs: {sizes: 3}",
            "'sized.py:Sized' cannot be made with these kwargs: missing a required argument: 'size'",
        ),
    ],
)
def test_a_callable_that_requests_cannot_call_is_not_served(folder: Path, entry: str, text: str) -> None:
    tensors = (
        "inputs: [{name: x, dtype: float32, shape: [-1]}], outputs: [{name: y, dtype: float32, shape: [-1]}]"
    )
    (folder / "c.yaml").write_text(f"models: [{{name: m, {entry}, {tensors}}}]\n")
    code, err = served("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    assert code == ExitCode.STARTUP_FAILURE
    assert err.splitlines()[-1] == f"model 'm': instance cpu#0 could not be started: {text}"
    assert "Traceback" not in err


def served(*flags: str) -> tuple[int, str]:
    done = finished([GPUSERVE, "serve", "c.yaml", *flags])
    return done.returncode, done.stderr


@pytest.mark.thorough
def test_a_package_that_is_not_installed(folder: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from gpuserve.cli.app import run; sys.exit(run())"
    done = finished([sys.executable, "-c", code, "bench", "m", "--output", "r.html"])
    needed = "this needs the package matplotlib, which is not installed: pip install 'gpuserve[bench]'"
    assert (done.returncode, done.stderr.strip()) == (ExitCode.RUNTIME_FAILURE, needed)


@pytest.mark.parametrize("line", ["schema", "version", "config c.yaml"])
@pytest.mark.parametrize("buffered", [True, False])
def test_output_on_a_full_disk(folder: Path, line: str, buffered: bool) -> None:
    (folder / "c.yaml").write_text(CONFIG)
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [GPUSERVE, *line.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env=environment,
        )
    expected = (ExitCode.RUNTIME_FAILURE, "the output cannot be written: No space left on device\n")
    assert (done.returncode, done.stderr) == expected


# ---- of clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", REQUESTS, ids=lambda one: one.name)
def test_a_wrong_request_is_told_in_one_sentence(server: Addresses, wrong: WrongRequest) -> None:
    connection = http.client.HTTPConnection(server.http, timeout=10)
    connection.request("POST", wrong.path, wrong.sent)
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert answer.status == wrong.status
    assert wrong.text in error
    assert "\n" not in error
