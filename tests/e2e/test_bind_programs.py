"""Programs of users that call ``bind()``, run as users run them: where their code lies, how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exploring import variants
from ingress import INGRESS_PROCESSES
from processes import descendants, finished, wait_until

TIMEOUT_S = 60.0

#: Everything a program may define in itself, with a neighbour module and a class in __main__.
PROGRAM = """
import numpy as np
from bound import FLOATS_IN_AND_OUT, ask, free_server
from neighbour import double, Doubler

class Base:
    def __init__(self, scale):
        self.scale = scale

class Scaled(Base):
    def __call__(self, requests):
        return [self.one(request) for request in requests]
    def one(self, request):
        return {"OUTPUT_1": request["INPUT_1"] * self.scale}

OFFSET = np.float32(10)

def offset(requests):
    return [{"OUTPUT_1": helper(request["INPUT_1"])} for request in requests]

def helper(array):
    return array + OFFSET

with free_server() as server:
    for name, infer_func in {
        "main": Scaled(np.float32(3)), "method": Scaled(np.float32(4)).__call__, "globals": offset,
        "lambda": lambda requests: requests, "neighbour": double, "neighbours_class": Doubler(),
    }.items():
        server.bind(name, infer_func, **FLOATS_IN_AND_OUT)
    server.run()
    for name in ("main", "method", "globals", "lambda", "neighbour", "neighbours_class"):
        print(name, ask(server, name, 2.0))
"""
NEIGHBOUR = """
from gpuserve.decorators import batch

@batch
def double(INPUT_1):
    return 2 * INPUT_1

class Doubler:
    def __call__(self, requests):
        return double(requests)
"""
EXPECTED = [
    "main [6.0]",
    "method [8.0]",
    "globals [12.0]",
    "lambda [2.0]",
    "neighbour [4.0]",
    "neighbours_class [4.0]",
]

#: Cells as a notebook runs them: source by source, in one namespace that is no file.
NOTEBOOK = """
cells = [
    "import numpy as np\\nfrom bound import FLOATS_IN_AND_OUT, ask, free_server",
    "class Model:\\n    def __call__(self, requests):\\n        return [self.one(r) for r in requests]",
    "def one(self, request):\\n    return {'OUTPUT_1': request['INPUT_1'] + weights[0]}",
    "Model.one = one\\nweights = np.full(3, 5, np.float32)",
    "server = free_server()\\nserver.bind('m', Model(), **FLOATS_IN_AND_OUT)\\nserver.run()",
    "print('m', ask(server, 'm', 1.0))",
    "server.bind('n', lambda requests: [one(None, r) for r in requests], **FLOATS_IN_AND_OUT)",
    "print('n', ask(server, 'n', 2.0))\\nserver.stop()",
]
namespace = NAMESPACE
for number, cell in enumerate(cells):
    exec(compile(cell, f"<ipython-input-{number}>", "exec"), namespace)
"""


def run(*command: str, cwd: Path) -> list[str]:
    done = finished([sys.executable, *command], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def _helpers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "elsewhere").mkdir()
    return folder


@pytest.mark.thorough
def test_a_script_run_from_another_directory(project: Path) -> None:
    assert run("../project/program.py", cwd=project.parent / "elsewhere") == EXPECTED


@pytest.mark.thorough
def test_a_module_run_by_its_name(project: Path) -> None:
    assert run("-m", "program", cwd=project) == EXPECTED


def test_a_program_on_the_command_line(project: Path) -> None:
    assert run("-c", PROGRAM, cwd=project) == EXPECTED


@pytest.mark.thorough
def test_a_program_that_adds_a_relative_import_path(project: Path) -> None:
    program = project.parent / "elsewhere" / "other.py"
    program.write_text(f"import sys\nsys.path.append('../project')\n{PROGRAM}")
    assert run("other.py", cwd=program.parent) == EXPECTED


@pytest.mark.thorough
@pytest.mark.parametrize("namespace", variants("{'__name__': '__main__'}", "{'__name__': 'notebook'}", "{}"))
def test_cells_of_a_notebook(tmp_path: Path, namespace: str) -> None:
    program = tmp_path / "kernel.py"
    program.write_text(NOTEBOOK.replace("NAMESPACE", namespace))
    assert run("kernel.py", cwd=tmp_path) == ["m [6.0]", "n [7.0]"]


#: Serves until it is told to end; prints what it does.
SERVING = """
import sys, threading
from bound import FLOATS_IN_AND_OUT, free_server

def serve():
    with free_server() as server:
        server.bind("m", lambda requests: requests, **FLOATS_IN_AND_OUT)
        threading.Thread(target=announce, args=(server,), daemon=True).start()
        server.serve()
        print("served", server.is_alive(), flush=True)

def announce(server):
    while not server.addresses:
        pass
    print("ready", flush=True)
    if "--stop" in sys.argv:
        server.stop()

if "--thread" in sys.argv:
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
else:
    serve()
"""


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ([], signal.SIGTERM),
        (["--stop"], None),
        pytest.param([], signal.SIGINT, marks=pytest.mark.thorough),
        pytest.param(["--thread", "--stop"], None, marks=pytest.mark.thorough),
    ],
)
def test_serve_blocks_until_it_is_told_to_end(
    tmp_path: Path, arguments: list[str], number: signal.Signals | None
) -> None:
    (tmp_path / "serving.py").write_text(SERVING)
    command = [sys.executable, "serving.py", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        family = descendants(process.pid)
        if number is not None:
            assert family
            process.send_signal(number)
        assert process.stdout.read() == "served False\n"
        assert process.wait(TIMEOUT_S) == 0
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("then", variants("server.stop()", "sys.exit(3)"))
def test_a_handler_of_the_programs_own_stays(tmp_path: Path, then: str) -> None:
    """It may stop the server, or end the program, whose models end with it."""
    program = f"""
import os, signal, sys, threading
from bound import FLOATS_IN_AND_OUT, free_server

def own(number, frame):
    print("own", flush=True)
    {then}

signal.signal(signal.SIGTERM, own)

def infer(requests):
    return requests

def tell_when_it_waits():
    while "wait_over" not in calls(sys._current_frames()[threading.main_thread().ident]):
        pass
    print("ready", flush=True)

def calls(frame):
    return [frame.f_code.co_name, *calls(frame.f_back)] if frame else []

with free_server() as server:
    server.bind("m", infer, **FLOATS_IN_AND_OUT)
    server.run()
    threading.Thread(target=tell_when_it_waits).start()
    server.serve()
    print(signal.getsignal(signal.SIGTERM) is own, flush=True)
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        ends_itself = "exit" in then
        assert process.stdout.read() == ("own\n" if ends_itself else "own\nTrue\n")
        assert process.wait(TIMEOUT_S) == (3 if ends_itself else 0)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.thorough
def test_a_signal_while_a_model_loads_ends_serve(tmp_path: Path) -> None:
    program = """
import os, signal
from bound import FLOATS_IN_AND_OUT, free_server

class Slow:
    def __init__(self):
        os.kill(os.getppid(), signal.SIGTERM)
        os.read(os.pipe()[0], 1)
    def __call__(self, requests):
        return requests

with free_server() as server:
    server.bind("m", Slow, **FLOATS_IN_AND_OUT)
    server.serve()
    print("served")
"""
    (tmp_path / "program.py").write_text(program)
    assert run("program.py", cwd=tmp_path) == ["served"]


@pytest.mark.parametrize(
    "ending", variants("os.kill(os.getpid(), signal.SIGKILL)", "", "raise SystemExit(3)")
)
def test_a_program_that_ends_without_stop_leaves_nothing(tmp_path: Path, ending: str) -> None:
    program = f"""
import os, signal
from bound import FLOATS_IN_AND_OUT, ask, free_server
server = free_server()
server.bind("m", lambda requests: requests, **FLOATS_IN_AND_OUT)
server.bind("t", lambda requests: requests, **FLOATS_IN_AND_OUT, isolation="thread")
server.run()
print(ask(server, "m", 1.0), ask(server, "t", 1.0), flush=True)
input()
{ending}
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "[1.0] [1.0]\n"
        family = descendants(process.pid)
        assert len(family) == 2 + (INGRESS_PROCESSES if INGRESS_PROCESSES > 1 else 0)
        process.stdin.write("\n")
        process.stdin.flush()
        code = process.wait(TIMEOUT_S)
    assert code == (0 if not ending else 3 if "Exit" in ending else -signal.SIGKILL)
    wait_until(lambda: not [pid for pid in family if _lives(pid)], "its children end", 2.0)


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.thorough
def test_the_program_is_not_touched(tmp_path: Path) -> None:
    """No handler of signals or logging is left behind, and the current directory is the user's."""
    program = """
import logging, os, signal
from bound import FLOATS_IN_AND_OUT, ask, free_server
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), os.getcwd()
with free_server() as server:
    server.bind("m", lambda requests: requests, **FLOATS_IN_AND_OUT)
    server.run()
    ask(server, "m", 1.0)
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), os.getcwd())
assert not logging.getLogger().handlers and not logging.getLogger("gpuserve").handlers
print("same")
"""
    (tmp_path / "program.py").write_text(program)
    assert run("program.py", cwd=tmp_path) == ["same"]
    assert os.getcwd()


FAILING = """
from bound import FLOATS_IN_AND_OUT, ask, free_server
from gpuserve.decorators import batch

@batch
def failing(INPUT_1):
    raise KeyError("no such row")

with free_server() as server:
    server.bind("failing", failing, **FLOATS_IN_AND_OUT)
    server.run()
    try:
        ask(server, "failing", 2.0)
    except Exception:
        pass
"""


def test_a_program_without_logging_shows_whose_failure_it_was_and_no_frame_of_ours(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILING)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    summary, *frames = done.stderr.splitlines()
    raised = "the inference callable of model 'failing' raised KeyError: 'no such row'"
    assert re.fullmatch(rf"\S+ \S+ ERROR   \[failing/0\] {raised}", summary), done.stderr
    assert [one for one in frames if one.startswith("  File")] == [
        '  File "<dynamic-code>", line 7, in failing'
    ]
