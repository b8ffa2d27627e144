"""What the device, its driver and its libraries do, as far as this server is built on it: every question of
``questions.py`` in a process of its own. An answer that was not expected becomes a note.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.gpu.questions.asked import QUESTIONS
from benchmarks.gpu.running.section import Findings, SectionFailed, Site

_TIMEOUT_S: Final = 60.0
#: 64 bytes that are no handle.
_BAD: Final = ("00" * 64, "ff" * 64, "55" * 64, bytes(range(64)).hex())
#: NVML's codes that only say that this GPU does not tell: ``gpuserve/devices/nvml.py``.
_UNTOLD: Final = frozenset({0, 2, 3, 4, 6, 13, 21, 25, 26})
_TAIL: Final = 600
#: The stand-in has neither torch nor speed.
_FOR_THE_STAND_IN: Final = frozenset(
    {"imports", "context", "kernels", "nvml", "own_handle", "handles", "lock", "bad_handle", "captures"}
)


def run(site: Site, findings: Findings) -> None:
    """See ``section.py``. Raises SectionFailed: no question was answered."""
    answers = 0
    for name, asked, arguments in _asked(site):
        answer = _answer(name, *arguments)
        findings.answer(" ".join((name, *(one[:8] for one in arguments))), asked, answer)
        if _FAILED in answer:
            continue
        answers += 1
        for note in _NOTES[name](answer) if name in _NOTES else ():
            findings.note(note)
    if not answers:
        raise SectionFailed("no question was answered")


def _asked(site: Site) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for one in QUESTIONS:
        name, asked = one.__name__, (one.__doc__ or "").partition("\n")[0]
        if not site.stand_in or name in _FOR_THE_STAND_IN:
            for arguments in [(text,) for text in _BAD] if name == "bad_handle" else [()]:
                yield name, asked, arguments


_FAILED: Final = "failed"


def _answer(*question: str) -> dict[str, Any]:
    """The answer, or how its process ended without one."""
    command = [sys.executable, "-m", "benchmarks.gpu.questions.asked", *question]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {_FAILED: f"no answer in {_TIMEOUT_S:.0f} s"}
    if done.returncode:
        return {_FAILED: f"status {done.returncode}: {done.stderr.strip()[-_TAIL:]}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# ---- what an answer decides ---------------------------------------------------------------------


def _of_nvml(answer: dict[str, Any]) -> Iterator[str]:
    strange = {name: code for name, (code, _) in answer.items() if code not in _UNTOLD}
    if strange:
        yield f"NVML answers with codes that are on no list: {strange}"


def _of_page_locks(answer: dict[str, Any]) -> Iterator[str]:
    lock_ms = answer["16384 KiB, first mapping"]["lock_ms"]
    if lock_ms > 5:
        yield f"Locking a segment of 16 MiB takes {lock_ms:.1f} ms: copies of a new one are slow for so long"


def _of_locking(answer: dict[str, Any]) -> Iterator[str]:
    small, huge = answer["small pages, mapped before"], answer["huge pages, mapped before"]
    if small["longest call beside it, ms"] > 1:
        yield f"While 256 MiB are locked, a call waits {small['longest call beside it, ms']:.1f} ms"
    if isinstance(huge, dict) and huge["lock_ms"] < small["lock_ms"] / 2:
        yield f"256 MiB are locked in {small['lock_ms']:.1f} ms, with huge pages in {huge['lock_ms']:.1f} ms"
    meanwhile = answer["copies from what is being locked"]
    if meanwhile["codes"] != [0] or not meanwhile["are right"]:
        yield f"Memory cannot be copied while it is being locked: {meanwhile}"


def _of_bandwidth(answer: dict[str, Any]) -> Iterator[str]:
    for way in ("to the device", "to the host"):
        ratio = answer[f"256 MiB {way}, memfd, locked"] / answer[f"256 MiB {way}, hostAlloc"]
        if ratio < 0.97:
            yield f"Copies {way} reach, with locked memfds, {ratio:.2f} of what CUDA's own memory does"
    both, one = (answer[f"256 MiB {way}, hostAlloc"] for way in ("both ways", "to the device"))
    if both < 1.6 * one:
        yield f"Both ways at once move {both / one:.2f} times what one way does: overlap cannot be more"


def _of_calls(answer: dict[str, Any]) -> Iterator[str]:
    spin, sleep = (answer[f"copy of 4 KiB and wait, {how}"] for how in ("spin", "sleep"))
    if sleep - spin > 50:
        yield f"A waiter that sleeps wakes {sleep - spin:.0f} us after one that spins"


def _of_handles(answer: dict[str, Any]) -> Iterator[str]:
    if answer["open after 64 bytes, freed there"] == 0:
        yield "The handle of a small allocation opens after it was freed: its block lives on"
    slowest_ms = max(one["open_ms"] for one in answer.values() if isinstance(one, dict))
    if slowest_ms > 5:
        yield f"Opening a handle takes {slowest_ms:.1f} ms, for which the first batch that names it waits"


def _of_lock(answer: dict[str, Any]) -> Iterator[str]:
    for what in ("open", "close"):
        found = answer[f"{what} by ctypes, beside a thread that records"]
        longest_ms = found["without_a_turn_ms"]
        if longest_ms > max(1, found["took_ms"] / 2):
            yield f"The driver itself keeps other threads' calls for {longest_ms:.1f} ms to {what} a handle"


def _of_waits(answer: dict[str, Any]) -> Iterator[str]:
    for name, seen in answer.items():
        if seen["without_a_turn_ms"] > max(2, seen["took_ms"] / 2):
            yield f"{name} keeps other threads from running for {seen['without_a_turn_ms']:.1f} ms"


def _of_full_queue(answer: dict[str, Any]) -> Iterator[str]:
    slow = {name: took_ms for name, took_ms in answer.items() if took_ms > 1}
    if slow:
        yield f"Behind a full queue calls take up to so many ms, in which cupy lets no thread run: {slow}"


def _of_bad_handle(answer: dict[str, Any]) -> Iterator[str]:
    if answer["device then"]:
        yield f"The device cannot be used after a handle that is none: CUDA error {answer['device then']}"


def _of_captures(answer: dict[str, Any]) -> Iterator[str]:
    if answer["relaxed"]["capture ends with"]:
        yield "A thread that tolerates captures spoils them all the same"


def _of_torch_facts(answer: dict[str, Any]) -> Iterator[str]:
    users = answer["storage users"], answer["storage users with a view"]
    if users != (2, 3):
        yield f"torch counts {users} users of a storage, without and with a view; expected (2, 3)"


def _of_torch_loop(answer: dict[str, Any]) -> Iterator[str]:
    alone, usual, *others = answer.items()
    if usual[1] < 0.9 * alone[1]:
        yield f"Threads beside torch's launches leave it {usual[1] / alone[1]:.2f} of its rate"
    best = max(others, key=lambda one: one[1])
    if best[1] > 1.03 * usual[1]:
        yield f"Torch's launches are {best[1] / usual[1]:.2f} times as fast {best[0]}"


_NOTES: Final[dict[str, Callable[[dict[str, Any]], Iterator[str]]]] = {
    "nvml": _of_nvml,
    "page_locks": _of_page_locks,
    "locking": _of_locking,
    "bandwidth": _of_bandwidth,
    "calls": _of_calls,
    "handles": _of_handles,
    "lock": _of_lock,
    "waits": _of_waits,
    "full_queue": _of_full_queue,
    "bad_handle": _of_bad_handle,
    "captures": _of_captures,
    "torch_facts": _of_torch_facts,
    "torch_loop": _of_torch_loop,
}
