"""The GPU check as a program: what becomes of sections that go well, fail, crash or hang, and that the
command runs on the stand-in for CUDA.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from site import getsitepackages
from typing import Any

import pytest
from gpu_machine import MPS_PROGRAM, GpuMachine
from processes import descendants, finished, wait_ended, wait_until

from benchmarks.gpu.running.one_by_one import Listener, run_sections
from benchmarks.gpu.running.report import Report, earlier
from benchmarks.gpu.running.section import (
    FACTS,
    PART_BUDGET_S,
    PARTS,
    SECTIONS,
    Effort,
    Findings,
    Found,
    Outcome,
    Section,
    SectionFailed,
    Site,
)
from benchmarks.gpu.sections.device_tests import Batch, batches, run_batch
from benchmarks.gpu.sections.facts import sharing
from benchmarks.processes import Process

REPOSITORY = Path(__file__).parent.parent.parent
_BUDGET_S = 60.0
_SHORT_S = 4.0


def _section(name: str, budget_s: float = _BUDGET_S, *, required: bool = True) -> Section:
    return Section(name, f"a section that {name}", f"gpu_sections:{name}", budget_s, required)


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    return {"PYTHONPATH": f"{REPOSITORY / 'tests/programs'}{os.pathsep}{REPOSITORY}"}


def _run(
    folder: Path, environment: Mapping[str, str], *sections: Section, budget_s: float = 120.0
) -> list[Found]:
    site = Site(folder, Effort.small(), stand_in=True)
    listener = Listener(lambda _line: None, lambda _found: None)
    return list(run_sections(sections, site, budget_s, listener, environment))


def test_a_section_that_fails_or_crashes_is_reported_and_the_others_go_on(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    names = ("raises", "crashes", "skipped", "wrong", "good")
    found = dict(zip(names, _run(tmp_path, environment, *map(_section, names)), strict=True))
    assert {name: one.outcome for name, one in found.items()} == {
        "raises": Outcome.FAILED,
        "crashes": Outcome.FAILED,
        "skipped": Outcome.SKIPPED,
        "wrong": Outcome.FAILED,
        "good": Outcome.DONE,
    }
    assert found["raises"].reason == "ValueError: three is not four"
    assert "SIGSEGV" in found["crashes"].reason
    assert [one["case"] for one in found["crashes"].findings["figures"]] == ["before the crash"]
    assert found["wrong"].reason == "a sum: it is five"
    report = Report({"GPU": "none"}, Effort.small(), True, 1.0, list(found.values()))
    assert report.failed
    text = report.markdown()
    assert "FAILED: ValueError: three is not four." in text
    assert "| a case (of something) | 0.95 (0.9 to 1) | ≥ 0.5 | - | 2 |" in text
    assert "SKIPPED: there is no such library." in text
    assert "not on a GPU" in text


@pytest.mark.thorough
def test_a_section_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    hung, good = _run(tmp_path, environment, _section("hangs", _SHORT_S), _section("good"))
    assert hung.outcome is Outcome.FAILED
    assert hung.reason == "it was ended when its budget of 4 s was spent"
    assert good.outcome is Outcome.DONE
    assert Process.read(int((tmp_path / "hangs/child.pid").read_text())) is None


def test_what_does_not_fit_the_budget_is_not_begun(tmp_path: Path, environment: Mapping[str, str]) -> None:
    (found,) = _run(tmp_path, environment, _section("good"), budget_s=1.0)
    assert found.outcome is Outcome.FAILED
    assert found.reason == "the budget of 1 s was spent before it"


def _check(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return finished(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
    )


@pytest.mark.thorough
def test_the_check_runs_on_the_stand_in_and_writes_its_report(tmp_path: Path) -> None:
    done = _check("--stand-in", "--only", "profile", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "gpu_report.json").read_text())
    assert document["stand_in"]
    assert not document["failed"]
    profile = document["sections"]["profile"]
    assert [one["case"] for one in profile["figures"]] == ["One request", "Several requests under way"]
    assert {one["kind"] for one in profile["facts"]["timeline"]["gpu_timeline.svg"]} == {"h2d", "call", "d2h"}
    assert "not on a GPU" in (tmp_path / "gpu_report.md").read_text()
    assert (tmp_path / "gpu_timeline.svg").read_text().startswith("<svg ")
    assert "(gpu_overlap.svg)" in (tmp_path / "gpu_timeline.md").read_text()


@pytest.mark.thorough
def test_facts_and_copies_on_the_stand_in(tmp_path: Path) -> None:
    done = _check("--stand-in", "--only", "facts,bandwidth", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    sections = json.loads((tmp_path / "gpu_report.json").read_text())["sections"]
    answers = sections["facts"]["answers"]
    assert answers["context"]["answer"]["total_nbytes"] > 0
    assert answers["handles"]["answer"]["device then"] == 0
    assert not any("failed" in one["answer"] for one in answers.values()), answers
    assert [one["case"] for one in sections["bandwidth"]["figures"]] == [
        "1 MiB to the device",
        "1 MiB to the host",
    ]
    assert (
        "| **handles**: Stand-in: What handles of another process open, "
        in (tmp_path / "gpu_report.md").read_text()
    )


def _under_way(out: Path) -> dict[str, Any]:
    """The facts that a running check has in its report."""
    report = out / "gpu_report.json"
    facts = json.loads(report.read_text())["sections"]["facts"] if report.exists() else {}
    return facts if facts.get("answers") else {}


@pytest.mark.thorough
def test_a_run_that_is_killed_keeps_what_it_had_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--stand-in",
        "--only",
        "facts",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL) as check:
        wait_until(lambda: "context" in _under_way(tmp_path).get("answers", {}), "its answer is there", 60)
        started = descendants(check.pid)
        check.kill()
    assert wait_ended(started, 20) == []
    assert started
    facts = _under_way(tmp_path)
    assert (facts["outcome"], facts["reason"]) == ("under way", "the run ended before this section did")
    assert facts["answers"]["context"]["answer"]["total_nbytes"] > 0
    assert "Stand-in: UNDER WAY: the run ended" in (tmp_path / "gpu_report.md").read_text()
    done = _check("--publish", str(tmp_path))
    assert (done.returncode, "is of the stand-in" in done.stderr) == (1, True), done.stderr


_TESTS = """
import pytest

def test_right(): assert True

def test_wrong(): assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="there is no second GPU")
def test_elsewhere(): pass

@pytest.fixture
def broken(): raise OSError("no such device")

def test_without_its_device(broken): pass
"""


@pytest.mark.thorough
def test_all_questions_about_sharing_and_libraries_are_answered_on_the_stand_in(tmp_path: Path) -> None:
    archive = tmp_path / "all.tgz"
    path = f"{MPS_PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    arguments = ("--stand-in", "--only", "sharing,frameworks", "--out", str(tmp_path / "out"))
    done = _check(*arguments, "--archive", str(archive), PATH=path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(archive) as whole:
        document = json.load(whole.extractfile("out/gpu_report.json") or io.BytesIO())
    answers = {
        name: one["answer"]
        for section in document["sections"].values()
        for name, one in section["answers"].items()
    }
    assert len(answers) == 10
    assert not [one for one in answers.items() if '"failed"' in json.dumps(one)]
    assert answers["small_instances"]["beside a fault, MPS"]["the other goes on"]
    assert answers["graphs cpu"]["cupy"]["in another thread"]
    assert "4 processes, MPS" in answers["small_instances"]
    shared = answers["shared_memory"]
    assert shared["map, after the loader was killed"]["right"]
    assert "cuda" in shared["write"]["a write"].lower()
    assert (taken := shared["less is free, MiB"])["after all"] == 0
    assert taken["held by a descriptor alone"] == 256 < taken["mapped, with a context"]


def test_questions_for_which_there_is_no_time_are_told_and_not_asked(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found.json")
    with pytest.raises(SectionFailed, match="no question was answered"):
        sharing(Site(tmp_path, Effort.small(), stand_in=True, budget_s=4.0), findings)
    told = {one["answer"]["failed"] for one in findings.answers.values()}
    assert told == {"it was not asked: the time of its section was spent"}


@pytest.mark.thorough
def test_device_tests_are_told_as_they_end(tmp_path: Path) -> None:
    file = tmp_path / "test_them.py"
    file.write_text(_TESTS)
    findings = Findings(tmp_path / "found.json")
    site = Site(tmp_path, Effort.small(), stand_in=True)
    assert list(run_batch(site, findings, Batch("tests", "", [file], 1))) == [
        "tests: pytest ended with status 1"
    ]
    assert [(one.name.partition("::")[2], one.right, one.seen) for one in findings.checks] == [
        ("", False, "1 passed, 2 failed, 1 skipped"),
        ("test_wrong", False, "call: AssertionError: one is not two"),
        ("test_without_its_device", False, "setup: OSError: no such device"),
    ]
    assert findings.skipped == {"1 of the tests": "there is no second GPU"}
    assert len(findings.facts["tests"]) == 4


@pytest.mark.thorough
def test_the_marks_of_each_batch_of_device_tests_select_some() -> None:
    files = sorted((REPOSITORY / "tests/device").glob("test_*.py"))
    for one in batches(files, stand_in=False):
        command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "--collect-only", "-m", one.mark]
        command += map(str, (one.files[0], one.files[-1]))
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
        assert done.returncode == 0, (one.name, done.stdout.decode())


def _found(section: Section) -> Found:
    return Found(section, Outcome.DONE, "", 1.0, {"notes": [f"a note of {section.name}"]})


def test_two_runs_on_one_machine_make_one_report(tmp_path: Path) -> None:
    machine = {"GPU": "one", "driver": "1"}
    first = [_found(one) for one in SECTIONS if one.part == FACTS]
    Report(machine, Effort.full(), False, 1.0, first).write(tmp_path)
    others = [one for one in SECTIONS if one.part == FACTS]
    assert earlier(tmp_path, machine, others) == first
    assert earlier(tmp_path, {**machine, "driver": "2"}, others) == []
    assert earlier(tmp_path / "none", machine, others) == []
    Report(machine, Effort.small(), True, 1.0, first).write(tmp_path)
    assert earlier(tmp_path, machine, others) == []
    assert earlier(tmp_path, machine, others, stand_in=True) == first


def test_only_a_whole_report_of_a_gpu_is_published(tmp_path: Path) -> None:
    assert "has no report" in _check("--publish", str(tmp_path)).stderr
    for stand_in, why in ((False, "lacks facts, bandwidth, "), (True, "is of the stand-in")):
        found = [_found(one) for one in SECTIONS if one.part == FACTS]
        found[0] = replace(found[0], outcome=Outcome.UNDER_WAY)
        Report({"GPU": "one"}, Effort.full(), stand_in, 1.0, found).write(tmp_path)
        done = _check("--publish", str(tmp_path))
        assert (done.returncode, why in done.stderr) == (1, True), done.stderr


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    done = _check("--only", "bandwidth", "--out", str(tmp_path / "out"))
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert "error: this machine shows no NVIDIA GPU" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script, in a checkout whose installation only leaves a mark."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    install = tmp_path / "scripts/install"
    install.write_text('#!/bin/sh\ntouch "$(dirname "$0")/installed"\nexit 1\n')
    install.chmod(0o755)
    copied = tmp_path / "scripts/gpu_check"
    shutil.copy(REPOSITORY / "scripts/gpu_check", copied)
    return copied


@pytest.mark.parametrize("arguments", [("--only", "nonsense"), ("--budget-s", "long"), ("--nonsense",)])
def test_a_usage_error_is_told_before_anything_is_installed(script: Path, arguments: tuple[str, ...]) -> None:
    done = finished([script, *arguments])
    assert (done.returncode, arguments[-1] in done.stderr) == (2, True), done.stderr
    assert not (script.parent / "installed").exists()


def test_without_a_gpu_nothing_is_installed(script: Path) -> None:
    if any(Path(one).exists() for one in ("/dev/nvidiactl", "/dev/dxg")) or shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA driver")
    done = finished([script])
    assert (done.returncode, done.stderr) == (1, "error: this machine shows no NVIDIA GPU\n")
    assert not (script.parent / "installed").exists()
    done = finished([script, "--stand-in"])
    assert (done.returncode, done.stderr) == (1, "")
    assert (script.parent / "installed").exists()


def test_figures_of_the_stand_in_never_become_documentation() -> None:
    done = _check("--stand-in", "--docs")
    assert done.returncode == 2
    assert "--docs takes a run of all sections on a GPU" in done.stderr


def _environment(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.running.environment", *arguments]
    return finished(command, cwd=REPOSITORY)


def test_an_environment_has_the_server_and_the_packages_of_an_interpreter(tmp_path: Path) -> None:
    made = _environment(str(tmp_path / "made"))
    assert made.returncode == 0, made.stderr
    python = Path(made.stdout.strip())
    command = [str(python.with_name("gpuserve")), "version"]
    done = finished(command, cwd=tmp_path, check=True)
    assert done.stdout.startswith("gpuserve ")


@pytest.mark.thorough
def test_the_libraries_of_cuda_that_an_interpreter_has_are_found_in_the_environment(tmp_path: Path) -> None:
    """``cuda.pathfinder`` looks into the folders of ``site`` alone, those of the new environment."""
    base = tmp_path / "base"
    venv.EnvBuilder(symlinks=True).create(base)
    (packages,) = base.glob("lib/python3*/site-packages")
    lines = [f"import site; site.addsitedir({one!r})" for one in getsitepackages()]
    (packages / "all.pth").write_text("\n".join(lines))
    for library in ("libnvrtc.so.13", "libcublas.so.13"):
        (packages / "nvidia/cu13/lib").mkdir(parents=True, exist_ok=True)
        (packages / "nvidia/cu13/lib" / library).touch()
    command = [str(base / "bin/python"), "-m", "benchmarks.gpu.running.environment", str(tmp_path / "made")]
    made = finished(command, cwd=REPOSITORY, check=True)
    machine = GpuMachine(tmp_path / "gpus", libraries_looked_up=True)
    program = [made.stdout.strip(), str(REPOSITORY / "tests/programs/cuda_unkindness.py")]
    done = finished(program, env=os.environ | machine.environ, check=True)
    assert json.loads(done.stdout) == {"copied": [0.0] * 4, "kernel": "", "product": ""}


def test_a_folder_without_wheels_is_told(tmp_path: Path) -> None:
    made = _environment(str(tmp_path / "made"), str(tmp_path))
    assert made.returncode == 1
    assert made.stderr == f"scripts/gpu_check: there are no wheels in {tmp_path}\n"


def _wheel(folder: Path, name: str, tag: str, version: str) -> None:
    """A package of one module that tells its version."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"told = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.thorough
def test_an_environment_takes_the_machines_own_packages_and_those_wheels_that_fit(tmp_path: Path) -> None:
    """The interpreter of an environment that sees its system's packages, and no network."""
    own, wheels = tmp_path / "own", tmp_path / "wheels"
    venv.EnvBuilder(system_site_packages=True, with_pip=True, symlinks=True).create(own)
    packages = next(own.glob("lib/python3*/site-packages"))
    (packages / "the_machine.pth").write_text(
        f"{next(path for path in sys.path if 'site-packages' in path)}\n"
    )
    (packages / "of_the_machine.py").write_text("told = 'its own'\n")
    wheels.mkdir()
    _wheel(wheels, "brought", "py3-none-any", "1.5")
    _wheel(wheels, "brought", "cp27-none-any", "2.0")
    command = [own / "bin/python", "-m", "benchmarks.gpu.running.environment", tmp_path / "made", wheels]
    made = finished(command, cwd=REPOSITORY)
    assert made.returncode == 0, made.stderr
    look = "import brought, of_the_machine, gpuserve, numpy; print(brought.told, of_the_machine.told)"
    done = finished([made.stdout.strip(), "-c", look], check=True)
    assert done.stdout == "1.5 its own\n"
    assert not list(packages.glob("brought*"))


@pytest.mark.parametrize("part", PARTS)
def test_the_sections_of_a_part_fit_into_ten_minutes(part: str) -> None:
    assert sum(one.budget_s for one in SECTIONS if one.part == part) <= PART_BUDGET_S < 570
