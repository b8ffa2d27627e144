"""What tests of PyTriton's programs import from ``pytriton.check.utils``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpuserve.compat.pytriton.check import (
    ProcessMonitoring,
    ScriptThread,
    get_current_container_version,
    search_warning_on_too_verbose_log_level,
    verify_docker_image_in_readme_same_as_tested,
)


def test_a_script_in_a_thread_has_its_output_and_its_children() -> None:
    pytest.importorskip("psutil")
    with ScriptThread([sys.executable, "-c", "import time; time.sleep(60)"], name="script") as script:
        assert script.process.children(recursive=True) == []
        script.process.terminate()
    assert (script.is_alive(), script.returncode) == (False, -15)
    with ScriptThread([sys.executable, "-c", "print('a'); print('b'); raise SystemExit(3)"]) as script:
        pass
    assert (script.output, script.returncode) == ("a\nb", 3)


def test_processes_are_told() -> None:
    pytest.importorskip("psutil")
    told: list[int] = []
    monitoring = ProcessMonitoring(os.getpid())
    monitoring.register_custom_monitor(told.append)
    monitoring.dump_state()
    assert told[0] == os.getpid()


def test_versions_of_containers_and_warnings_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_PYTORCH_VERSION", "24.10-x")
    assert get_current_container_version() == "24.10"
    readme = tmp_path / "README.md"
    readme.write_text("docker run nvcr.io/nvidia/pytorch:24.10-py3\n")
    verify_docker_image_in_readme_same_as_tested(str(readme), "nvcr.io/nvidia/pytorch:24.10-py3")
    with pytest.raises(AssertionError, match=r"24\.10-py3 != .*24\.11"):
        verify_docker_image_in_readme_same_as_tested(str(readme), "nvcr.io/nvidia/pytorch:24.11-py3")
    assert search_warning_on_too_verbose_log_level("nothing") is None
