"""Programs as they are written for PyTriton, unmodified, run by ``gpuserve run`` as their users run them.

They lie in ``tests/programs``. Each is told the ports of its server, which it gets by PyTriton's own
environment variables; most ask their server themselves, by ``pytriton.client``. With the variable
``PYTRITON_PYTHON``, a Python that has PyTriton 0.7.0 (the benchmarks install one below ``.cache/bench``),
they run with PyTriton instead, which shows where it does the same.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from exploring import variants
from processes import finished, wait_until
from serving import GPUSERVE, unlikely_port
from tritonclient.utils import InferenceServerException

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
TIMEOUT_S = 90.0
PYTRITON = os.environ.get("PYTRITON_PYTHON", "")
#: What Triton itself writes to stdout.
_LOGGED = re.compile(r"[IWE]\d{4} |[+|]|Error: Failed to initialize NVML|Signal \(2\) received|$")
ROLES = ("HTTP", "GRPC", "METRICS")


@pytest.fixture
def ports() -> dict[str, int]:
    """A free port for each role."""
    return {role: unlikely_port() for role in ROLES}


def command(program: str, ports: dict[str, int], *flags: str) -> list[str]:
    start = [PYTRITON] if PYTRITON else [GPUSERVE, "run", *flags]
    return [*start, str(PROGRAMS / program), str(ports["HTTP"]), str(ports["GRPC"])]


def environment(ports: dict[str, int]) -> dict[str, str]:
    return {
        **os.environ,
        **{f"PYTRITON_TRITON_CONFIG_{role}_PORT": str(port) for role, port in ports.items()},
    }


def run(program: str, ports: dict[str, int], *flags: str, complains: bool = False) -> list[str]:
    """What the program prints, if it ends well and has nothing to complain of, or may have."""
    done = subprocess.run(
        command(program, ports, *flags),
        env=environment(ports),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, "" if complains or PYTRITON else done.stderr) == (0, ""), done.stderr
    return [line for line in done.stdout.splitlines() if not (PYTRITON and _LOGGED.match(line))]


@contextmanager
def serving(program: str, model: str, ports: dict[str, int], *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A program that serves until it is told to end; its model is ready."""
    process = subprocess.Popen(
        command(program, ports, *flags),
        env=environment(ports),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = f"http://localhost:{ports['HTTP']}/v2/models/{model}/ready"
        wait_until(lambda: process.poll() is not None or is_ready(url), f"{model} is ready")
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.thorough
def test_shared_state(ports: dict[str, int]) -> None:
    assert run("shared_state.py", ports) == [
        "False False",
        "True True",
        "{'count': array([3])}",
        "[[3.0], [30.0]]",
        "3",
        "True False",
        "False False",
    ]


@pytest.mark.thorough
def test_what_is_the_same(ports: dict[str, int]) -> None:
    assert run("same.py", ports) == [
        "1",
        "[200, 200, 200]",
        "[403, 403, 403, 403]",
        "[200, 200, 200, 200]",
        "[]",
        '[\'nv_inference_request_success{model="Count",version="1"} 8\']',
        "False",
        "[[[0.0], [0.0]], [[0.0], [0.0]], [[1.0]]]",
    ]


@pytest.mark.thorough
def test_instances(ports: dict[str, int]) -> None:
    assert run("instances.py", ports) == ["[[10.0], [100.0]]"]


@pytest.mark.thorough
@pytest.mark.parametrize("flags", variants((), ("--isolation", "process")))
def test_coroutines(ports: dict[str, int], flags: tuple[str, ...]) -> None:
    answers = "[[0, 0], [2, 2], [4, 4]]"
    assert run("asynchronous.py", ports, *flags) == [f"Double {answers}", f"OneByOne {answers}"] * 2


@pytest.mark.parametrize("flags", variants((), ("--isolation", "process")))
def test_streams(ports: dict[str, int], flags: tuple[str, ...]) -> None:
    *streams, refused = run("streaming.py", ports, *flags)
    assert streams == ["[[0], [1], [2]]", "[[[0], [0]], [[1], [1]]]", "[[b'streams'], [b'of'], [b'words']]"]
    assert "decoupled" in refused


@pytest.mark.thorough
@pytest.mark.skipif(
    bool(PYTRITON),
    reason="PyTriton raises for a callable that runs an event loop, lists all models in the context, loses a "
    "second yield until the time-out, and cannot load a model that was unloaded",
)
def test_what_is_passed_on_as_it_is_given(ports: dict[str, int]) -> None:
    assert run("passed_on.py", ports, complains=True) == [
        "Loss {'y': [[64.0]]}",
        "ZeroD {'y': 5.0}",
        "Nothing {}",
        "Parsed {'y': [[1.5]]}",
        "Spelled {'y': [[b'1.5']]}",
        "None {'y': [[b'x', b'None']]}",
        "OneYield {'y': [[2.0], [2.0]]}",
        "TwoYields The inference callable gave more than one response; expected exactly one response, or a "
        "model that is decoupled",
        "Raises first line",
        "  second line",
        "EventLoop {'y': [[2.0], [2.0]]}",
        "Configured {'y': [[b'Configured']]}",
        "TooFew Received output 'y' of shape (1, 1), but the batch has 64 rows: the first axis of every "
        "output must be as long",
        "StrictLoss {'y': [[64.0]]}",
        "Merged [{'y': [[1.0]]}, {'y': [[63.0]]}]",
        "Overlap 1",
        "unloaded False",
        "loaded {'y': [[2.0]]}",
    ]


@pytest.mark.thorough
def test_what_clients_refuse_and_leave_running(ports: dict[str, int]) -> None:
    asked = ["{'y': array([2.], dtype=float32)}", *["PyTritonClientInferenceServerError True"] * 3]
    assert run("clients.py", ports) == ["0.7.0", *asked, *asked, "runs to its end: True"]


def test_parameters_and_headers(ports: dict[str, int]) -> None:
    seen = "('header_one', '1'), ('name', 'x'), ('other', None), ('scale', 3)]"
    answer = "{'OUTPUT_1': array([3.], dtype=float32)}"
    http, grpc = (f"[('flag', True), ('Header-Two', {one!r}), {seen}" for one in ("3", None))
    assert run("parameters.py", ports) == [http, answer, grpc, answer]


@pytest.mark.thorough
def test_optional_inputs(ports: dict[str, int]) -> None:
    assert run("optional_inputs.py", ports) == [
        "[[6.0, 7.0], [8.0, 9.0]]",
        "[[1.0, 2.0], [4.0, 5.0]]",
        "[60.0, 70.0]",
    ]


@pytest.mark.thorough
def test_grouping(ports: dict[str, int]) -> None:
    assert run("grouping.py", ports) == [
        "[b'a']",
        "[b'ab']",
        "[[0, 1, 2], [10, -1, -1], [20, 21, 22]]",
    ]


@pytest.mark.thorough
def test_configured(ports: dict[str, int]) -> None:
    first, second, batcher, refused = run("configured.py", ports)
    assert first == second == "{'OUTPUT_1': array([17.], dtype=float32)}"
    assert "preferred_batch_size=[2, 4]" in batcher
    assert "priority_levels=2" in batcher
    assert refused.startswith("PyTritonClientInferenceServerError")
    assert "restricted" in refused


@pytest.mark.thorough
def test_a_second_program_brings_a_model(ports: dict[str, int]) -> None:
    assert run("remote_server.py", ports) == [
        "False True False True True",
        "[1.0, 1.0]",
        "[-1.0, -1.0]",
        "0",
        "[1.0, 1.0]",
        "PyTritonClientModelUnavailableError",
    ]


@pytest.mark.thorough
def test_questions_by_a_tritonclient(ports: dict[str, int]) -> None:
    late = "Waiting for model Other/<latest> to be ready timed out."
    asked = [
        "ModelState.READY ModelState.UNAVAILABLE",
        "TensorSpec(name='values', shape=(2,), dtype=<class 'numpy.float32'>, optional=False)",
        late,
        "ModelState.READY",
        "(2,)",
        late,
    ]
    printed = [line.partition(" Message:")[0] for line in run("utilities.py", ports)]
    assert printed == ["False None", "True", *asked, *asked]


@pytest.mark.thorough
def test_a_server_in_a_thread(ports: dict[str, int]) -> None:
    negative = "{'values': array([-1.], dtype=float32)}"
    assert run("in_thread.py", ports) == [negative, negative, "True True", "[False, False] False"]


@pytest.mark.thorough
@pytest.mark.parametrize("flags", variants((), ("--isolation", "process")))
def test_children_of_the_program_find_pytriton(ports: dict[str, int], flags: tuple[str, ...]) -> None:
    (printed,) = run("spawns.py", ports, *flags)
    assert printed.startswith("[-1.0] QueuePolicy(timeout_action=<TimeoutAction.REJECT")


@pytest.mark.thorough
@pytest.mark.parametrize("number", variants(signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("flags", variants((), ("--isolation", "process")))
def test_tritonclient_asks_until_the_program_is_stopped(
    ports: dict[str, int], number: int, flags: tuple[str, ...]
) -> None:
    a, b = np.array([[1, 2]], np.float32), np.array([[3, 5]], np.float32)
    with serving("add_sub.py", "AddSub", ports, *flags) as process:
        for module, port in ((httpclient, ports["HTTP"]), (grpcclient, ports["GRPC"])):
            inputs = [module.InferInput(name, a.shape, "FP32") for name in "ab"]
            for one, array in zip(inputs, (a, b), strict=True):
                one.set_data_from_numpy(array)
            with module.InferenceServerClient(f"localhost:{port}") as client:
                answer = client.infer("AddSub", inputs)
            assert answer.as_numpy("add").tolist() == [[4, 7]]
            assert answer.as_numpy("sub").tolist() == [[-2, -3]]
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, stdout) == (0, "served\n")
    assert "Traceback" not in stderr
    assert "Infer function available as model: `/v2/models/AddSub`" in stderr


@pytest.mark.thorough
@pytest.mark.skipif(bool(PYTRITON), reason="PyTriton ends at once; its client waits for ever")
def test_sigterm_after_run_finishes_what_is_under_way(ports: dict[str, int]) -> None:
    with (
        serving("runs.py", "Slow", ports) as process,
        grpcclient.InferenceServerClient(f"localhost:{ports['GRPC']}") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        x = grpcclient.InferInput("x", [1, 1], "FP32")
        x.set_data_from_numpy(np.ones((1, 1), np.float32))
        pending = pool.submit(client.infer, "Slow", [x])
        assert process.stdout is not None
        assert next(line for line in process.stdout if not _LOGGED.match(line)) == "called\n"
        process.send_signal(signal.SIGTERM)
        assert pending.result(TIMEOUT_S).as_numpy("x").tolist() == [[-1]]
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.thorough
def test_endpoints_that_change_the_server_need_a_token(ports: dict[str, int]) -> None:
    with (
        serving("add_sub.py", "AddSub", ports),
        httpclient.InferenceServerClient(f"localhost:{ports['HTTP']}") as client,
    ):
        with pytest.raises(InferenceServerException, match="This API is restricted"):
            client.get_model_repository_index()
        assert client.get_model_metadata("AddSub")["name"] == "AddSub"


@pytest.mark.thorough
@pytest.mark.parametrize("flags", variants((), ("--isolation", "process")))
def test_a_model_that_cannot_go_on_ends_the_program(ports: dict[str, int], flags: tuple[str, ...]) -> None:
    with serving("unrecoverable.py", "Breaks", ports, *flags) as process:
        given = grpcclient.InferInput("values", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        with (
            grpcclient.InferenceServerClient(f"localhost:{ports['GRPC']}") as client,
            pytest.raises(InferenceServerException, match="no further inferences possible"),
        ):
            client.infer("Breaks", [given])
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "PyTritonUnrecoverableError: " in stderr.splitlines()[-1]


def test_a_program_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = __name__\n")
    (tmp_path / "program.py").write_text(
        "import sys, neighbour, threading\n"
        "print(__name__, __file__, sys.argv, sys.path[0], neighbour.NAME, __package__)\n"
        "print([name for name in sys.modules if name.startswith('gpuserve.')], threading.active_count())\n"
        "print(input())\n"
        "def fail(): raise RuntimeError('of the program')\n"
        "sys.exit(7) if sys.argv[1:] else fail()\n"
    )

    def done(*command: str) -> tuple[int, list[str], str]:
        made = finished([*command], cwd=tmp_path, input="typed\n")
        return made.returncode, made.stdout.splitlines(), made.stderr

    for arguments in (["program.py"], ["program.py", "--isolation", "-h", "a b"], ["-m", "program", "-m"]):
        ours = done(GPUSERVE, "run", *arguments)
        theirs = done(sys.executable, *arguments)
        assert ours == theirs
    assert ours[0] == 7
    assert done(sys.executable, "-m", "gpuserve", "run", "program.py", "x")[0] == 7


@pytest.mark.parametrize(
    "arguments", variants(["pytriton", "check"], ["-m", "pytriton", "examples", "--no-zip"])
)
def test_pytritons_own_command(arguments: list[str]) -> None:
    done = finished([GPUSERVE, "run", *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("AddSub is served, and its answers are right.\n")
