"""``gpuserve dev`` as its user has it: files are saved, keys are pressed, and somebody asks all the while."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from dev_terminal import DevTerminal, Terminal, put
from processes import wait_until
from serving import FREE_PORTS, GPUSERVE

MODEL = """from gpuserve.typed import Float32, batch
import factors


@batch(max_batch_size=4)
def scaled(x: Float32) -> Float32:
    return factors.FACTOR * x
"""
PLAIN = """class Plain:
    def __call__(self, requests):
        return [{"y": FACTOR * one["x"]} for one in requests]
"""
CONFIG = """models:
  - {name: scaled, callable: scaled.py}
  - name: plain
    callable: plain.py:Plain
    inputs: [{name: x, dtype: float32, shape: [-1, 1]}]
    outputs: [{name: y, dtype: float32, shape: [-1, 1]}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path / "scaled.py", MODEL)
    put(tmp_path / "factors.py", "FACTOR = 2.0\n")
    return tmp_path


@pytest.fixture
def config(folder: Path) -> Path:
    put(folder / "plain.py", f"FACTOR = 10.0\n{PLAIN}")
    put(folder / "config.yaml", CONFIG.replace("scaled.py}", "scaled.py:scaled}"))
    return folder


def test_a_file_that_a_model_imports_is_saved_and_broken_and_mended(folder: Path) -> None:
    with DevTerminal(folder, "scaled.py") as dev:
        dev.ready()
        assert dev.infer("scaled") == 2.0
        put(folder / "factors.py", "FACTOR = 3.0\n")
        dev.wait_answer("scaled", 3.0)
        put(folder / "factors.py", "FACTOR = (3.0\n")
        dev.wait("config reload: model scaled: scaled.py: importing scaled.py raised SyntaxError")
        assert dev.infer("scaled") == 3.0
        shown = f'File "{folder}/factors.py", line 1\n    FACTOR = (3.0\n             ^\nSyntaxError'
        assert dev.text.count(shown) == dev.text.count("Traceback") == 1
        assert "frozen importlib" not in dev.text
        put(folder / "factors.py", "FACTOR = 4.0\n")
        dev.wait_answer("scaled", 4.0)
        dev.press("q")
        assert dev.process.wait(20.0) == 0
        assert dev.current_mode == dev.mode


@pytest.mark.thorough
def test_only_what_has_changed_is_loaded_anew_and_once(config: Path) -> None:
    with DevTerminal(config, "config.yaml") as dev:
        dev.ready()
        for factor in (3.0, 4.0, 5.0, 6.0):
            put(config / "factors.py", f"FACTOR = {factor}\n")
        dev.wait_answer("scaled", 6.0)
        put(config / "plain.py", f"FACTOR = 20.0\n{PLAIN}")
        dev.wait_answer("plain", 20.0)
        put(config / "plain.py", "1 / 0")
        dev.wait("ZeroDivisionError: division by zero\n")
        put(config / "factors.py", "FACTOR = 7.0\n")  # in the folder of a model that is broken
        dev.wait_answer("scaled", 7.0)
        put(config / "plain.py", f"FACTOR = 30.0\n{PLAIN}")
        dev.wait_answer("plain", 30.0)
        put(
            config / "config.yaml", (config / "config.yaml").read_text().replace("name: plain", "name: other")
        )
        dev.wait("config reload: model plain is unloaded")
        assert dev.infer("other") == 30.0
        put(config / "lacks.py", f"from factor import FACTOR\n{PLAIN}")
        entry = CONFIG[CONFIG.index("  - name: plain") :].replace("plain", "lacks")
        put(config / "config.yaml", (config / "config.yaml").read_text() + entry)
        dev.wait("ModuleNotFoundError: No module named 'factor'\n")
        put(config / "factor.py", "FACTOR = 40.0\n")
        dev.wait("config reload: model lacks is loaded")
        assert dev.infer("lacks") == 40.0
        assert dev.end() == 0
    anew = re.findall(r"config reload: model (\w+) is reloaded", dev.text)
    assert anew == ["scaled", "plain", "scaled", "plain"]
    assert dev.text.count("Traceback") == 2


@pytest.mark.thorough
def test_files_come_and_go(folder: Path) -> None:
    with DevTerminal(folder, "scaled.py") as dev:
        dev.ready()
        put(folder / "scaled.py", f"import more.of_it as factors\n{MODEL.replace('import factors', '')}")
        dev.wait("ModuleNotFoundError: No module named 'more'\n")
        (folder / "more").mkdir()
        put(folder / "more" / "of_it.py", "FACTOR = 8.0\n")
        dev.wait_answer("scaled", 8.0)
        put(folder / "more" / "of_it.py", "FACTOR = 9.0\n")
        dev.wait_answer("scaled", 9.0)
        (folder / "scaled.py").unlink()
        dev.wait("there is no file")
        assert dev.infer("scaled") == 9.0
        put(folder / "scaled.py", MODEL)
        dev.wait_answer("scaled", 2.0)
        late = MODEL.replace("import factors", "").replace(
            "    return", "    import late as factors\n    return"
        )
        put(folder / "late.py", "FACTOR = 11.0\n")
        put(folder / "scaled.py", late)
        dev.wait_answer("scaled", 11.0)
        anew = dev.text.count("is reloaded")
        for attempt in range(20):  # a moment after the call that imports it
            put(folder / "late.py", f"FACTOR = {attempt}.5\n")
            if dev.shows("is reloaded", anew + 1, 1.0):
                break
        dev.wait("is reloaded", anew + 1)
        assert dev.end() == 0


@pytest.mark.thorough
def test_a_model_that_is_wrong_from_the_start_is_waited_for(folder: Path) -> None:
    put(folder / "factors.py", "FACTOR = 2.0 +\n")
    with DevTerminal(folder, "scaled.py") as dev:
        dev.wait("Waiting for a change of the files")
        put(folder / "factors.py", "FACTOR = 5.0\n")
        dev.ready()
        assert dev.infer("scaled") == 5.0
        assert dev.end() == 0
    with DevTerminal(folder, "scaled.txt") as dev:
        assert dev.process.wait(20.0) != 0
    put(folder / "factors.py", "FACTOR = 2.0 +\n")
    with DevTerminal(folder, "scaled.py") as dev:
        dev.wait("Waiting for a change of the files")
        dev.press("\x03")
        assert dev.process.wait(20.0) == 4  # as it would have ended at once


@pytest.mark.thorough
def test_keys_and_the_mode_of_the_terminal(folder: Path) -> None:
    with DevTerminal(folder, "scaled.py") as dev:
        dev.ready()
        wait_until(lambda: dev.current_mode != dev.mode, "single keys are read")
        dev.press("h")
        dev.wait("Keys: r reload all models", 2)
        dev.press("s")
        dev.wait("MODEL   INSTANCE")
        dev.press("xR")
        dev.wait("config reload: model scaled is reloaded")
        assert dev.end(signal.SIGTERM) == 0
        assert dev.current_mode == dev.mode


@pytest.mark.thorough
def test_it_is_stopped_and_goes_on_as_a_job_of_a_shell(folder: Path) -> None:
    with Terminal(folder, "env", "TERM=dumb", "bash", "--norc", "--noprofile", "-i") as shell:
        shell.press(f"PS1='> '; {GPUSERVE} dev scaled.py {' '.join(FREE_PORTS)}\n")
        shell.wait("Keys: r reload")
        shell.press("s")
        shell.wait("MODEL   INSTANCE")
        shell.press("\x1a")
        shell.wait("Stopped")
        shell.press("stty -a | grep -o ' -\\?icanon'; echo mode $((1 + 1))\n")
        shell.wait("\nmode 2")
        assert "\n icanon" in shell.text
        shell.press("fg\n")
        shell.wait(f"fg\n{GPUSERVE} dev")  # the shell's word that it goes on
        shell.press("s")
        shell.wait("MODEL   INSTANCE", 2)
        shell.press("q")
        wait_until(lambda: "\n> " in shell.text.partition("stopping: ")[2], "it has ended")
        shell.press("stty -a | grep -o ' -\\?icanon'; echo mode $((1 + 2))\n")
        shell.wait("\nmode 3")
        assert "\n icanon" in shell.text.partition("stopping: ")[2]


def save(path: Path, text: str) -> None:
    """Save a file as some editors do, in its place."""
    path.write_text(text)


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["serve", "serve --reload", "dev"])
def test_imports_are_followed_without_a_terminal(config: Path, verb: str) -> None:
    log = config / "log"
    if verb == "serve":
        settings = "server: {model_control: poll, repository_poll_s: 0.1}\n"
        put(config / "config.yaml", settings + (config / "config.yaml").read_text())
    command = [GPUSERVE, *verb.split(), "config.yaml", *FREE_PORTS]
    with log.open("w") as stream:
        server = subprocess.Popen(command, cwd=config, stdin=subprocess.DEVNULL, stderr=stream)
    try:
        wait_until(lambda: "Ctrl-C stops the server" in log.read_text(), "it is ready")
        save(config / "factors.py", "FACTOR = 3.0\n")
        wait_until(lambda: "model scaled is reloaded" in log.read_text(), "it is reloaded")
        assert "changed: factors.py" in log.read_text()
        assert "Keys" not in log.read_text()
        server.send_signal(signal.SIGINT)
        assert server.wait(20.0) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.thorough
def test_a_load_that_hangs_is_taken_back_when_its_file_is_mended(config: Path) -> None:
    with DevTerminal(config, "config.yaml") as dev:
        dev.ready()
        put(config / "plain.py", f"import time\ntime.sleep(1000)\n{PLAIN}")
        dev.wait("[plain/cpu#0] importing", 1)
        put(config / "plain.py", f"FACTOR = 20.0\n{PLAIN}")
        dev.wait_answer("plain", 20.0)
        assert dev.end() == 0


@pytest.mark.thorough
def test_a_folder_that_is_made_again_is_followed(folder: Path) -> None:
    package = folder / "more"
    package.mkdir()
    put(package / "of_it.py", "FACTOR = 8.0\n")
    put(folder / "scaled.py", f"import more.of_it as factors\n{MODEL.replace('import factors', '')}")
    with DevTerminal(folder, "scaled.py") as dev:
        dev.ready()
        package.rename(folder / "before")
        package.mkdir()
        put(package / "of_it.py", "FACTOR = 9.0\n")
        dev.wait_answer("scaled", 9.0)
        put(package / "of_it.py", "FACTOR = 7.0\n")
        dev.wait_answer("scaled", 7.0)
        assert dev.end() == 0


TRITON_MODEL = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", FACTOR * one)]) for one in x]
"""
PBTXT = """backend: "python"
max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
"""


@pytest.mark.thorough
def test_a_triton_repository_is_followed(tmp_path: Path) -> None:
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    put(version / "model.py", f"FACTOR = 2\n{TRITON_MODEL}")
    put(version.parent / "config.pbtxt", PBTXT)
    with DevTerminal(tmp_path, "models") as dev:
        dev.ready()
        put(version / "model.py", f"FACTOR = 3\n{TRITON_MODEL}")
        dev.wait_answer("m", 3.0)
        put(version.parent / "config.pbtxt", PBTXT.replace("4", "8"))
        dev.wait("is reloaded", 2)
        other = tmp_path / "models" / "n" / "1"
        other.mkdir(parents=True)
        put(other / "model.py", f"FACTOR = 5\n{TRITON_MODEL}")
        put(other.parent / "config.pbtxt", PBTXT)
        dev.wait("model n is loaded")
        assert dev.infer("n") == 5.0
        assert dev.end() == 0
