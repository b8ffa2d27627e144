"""What the device, its driver and its libraries do, as far as this server is built on it: every question of
``questions.py`` in a process of its own. An answer that was not expected becomes a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from benchmarks.gpu.questions.asked import FRAMEWORKS, QUESTIONS, SHARING
from benchmarks.gpu.questions.asking import FAILED, Answer, answer
from benchmarks.gpu.running.section import Findings, SectionFailed, Site

#: For a question, which must not take the time of all.
_TIMEOUT_S: Final = 30.0
_LONG: Final = {"small_instances": 60.0, "compiled": 60.0}
#: Of the section's time, for what comes after the last question; less than the second is no time to ask one.
_END_S: Final = 3.0
_LEAST_S: Final = 2.0
#: NVML's codes that only say that this GPU does not tell: ``gpuserve/devices/nvml.py``.
_UNTOLD: Final = frozenset({0, 2, 3, 4, 6, 13, 21, 25, 26})
#: The stand-in has neither speed nor torch on a GPU.
_NOT_FOR_THE_STAND_IN: Final = frozenset(
    {"host_memory", "page_locks", "locking", "calls", "allocations", "bandwidth", "waits", "full_queue"}
    | {"torch_facts", "torch_loop"}
)


def run(site: Site, findings: Findings) -> None:
    """See ``section.py``. Raises SectionFailed: no question was answered."""
    _ask(QUESTIONS, site, findings)


def sharing(site: Site, findings: Findings) -> None:
    """As ``run``, about processes that share the GPU, and the host's memory."""
    _ask(SHARING, site, findings)


def frameworks(site: Site, findings: Findings) -> None:
    """As ``run``, about libraries of networks."""
    _ask(FRAMEWORKS, site, findings)


def _ask(questions: Sequence[Callable[..., Answer]], site: Site, findings: Findings) -> None:
    deadline = time.monotonic() + site.budget_s - _END_S
    answers = 0
    for one in questions:
        name = one.__name__
        for arguments in _arguments(name, site):
            left_s = deadline - time.monotonic()
            limit_s = min(_LONG.get(name, _TIMEOUT_S), left_s)
            given = (
                answer([name, *arguments], limit_s)
                if limit_s >= _LEAST_S
                else {FAILED: "it was not asked: the time of its section was spent"}
            )
            asked = " ".join((one.__doc__ or "").partition("\n\n")[0].split())
            findings.answer(" ".join((name, *(text[:8] for text in arguments))), asked, given)
            if FAILED in given:
                continue
            answers += 1
            try:
                for note in _NOTES[name](given) if name in _NOTES else ():
                    findings.note(note)
            except (KeyError, TypeError, ValueError) as error:  # an answer of a kind that nobody has seen
                findings.note(f"The answer to {name} is not as expected ({type(error).__name__}: {error})")
    if not answers:
        raise SectionFailed("no question was answered")


def _arguments(name: str, site: Site) -> list[tuple[str, ...]]:
    """With what a question is asked, once or more often."""
    if site.stand_in and name in _NOT_FOR_THE_STAND_IN:
        return []
    device = "cpu" if site.stand_in else "cuda"
    return {
        "bad_host_pointer": [("from",), ("to",)],
        "strided": [(device,)],
        "graphs": [(device,)],
        "onnx": [(device,)],
        "compiled": [(device, "eager" if site.stand_in else "inductor")],
    }.get(name, [()])


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


def _of_host_pointers(answer: dict[str, Any]) -> Iterator[str]:
    if answer["pageableMemoryAccess"] == 1:
        yield "The GPU reaches all memory of the host (HMM or ATS): a bad host pointer may be a fault"


def _of_bad_host_pointer(answer: dict[str, Any]) -> Iterator[str]:
    if answer["device then"]:
        yield f"A bad host pointer ends the process's use of its device: CUDA error {answer['device then']}"


def _of_two_processes(answer: dict[str, Any]) -> Iterator[str]:
    alone, beside = answer["alone"], answer["beside long kernels"]
    if beside.get("p99_ms", 0) > 3 * alone["p99_ms"]:
        seen = f"{beside['p99_ms']:.1f} ms (p99) beside another process, {alone['p99_ms']:.1f} alone"
        yield f"Small kernels take {seen}"
    if answer["NVML lists"]["of these"] < 3:
        yield f"NVML lists {answer['NVML lists']} processes: it does not know those here by their ids"


def _of_small_instances(answer: dict[str, Any]) -> Iterator[str]:
    count = next(name for name in answer if name.endswith("processes"))
    plain, mps = (answer.get(name, {}).get("rounds/s, all") for name in (count, f"{count}, MPS"))
    if plain and mps:
        yield f"{count} of small kernels compute {mps / plain:.2f} times as much with MPS as without"


def _of_shared_memory(answer: dict[str, Any]) -> Iterator[str]:
    mapped, less = answer["map, after the loader was killed"], answer["less is free, MiB"]
    if not (mapped.get("right") and mapped.get("the same address again, right")):
        yield f"Shared memory of the device is not what the loader laid there: {mapped}"
    if less["held by a descriptor alone"] < 256 or less["after all"] > 128:
        yield f"Shared memory does not live as long as its descriptors and mappings: {less}"
    if answer["write"].get("a write") == "was done":
        yield "The driver maps no memory for reading alone: a callable that writes changes the weights of all"


def _of_strided(answer: dict[str, Any]) -> Iterator[str]:
    slow = [name for name, one in answer.items() if isinstance(one, dict) and one["first_s"] > 0.2]
    if slow:
        yield f"More than 0.2 s take the first conversions by {', '.join(slow)}"
    if not answer["the worker's is right"]:
        yield "The worker's conversion of a strided tensor is wrong"


def _of_graphs(answer: dict[str, Any]) -> Iterator[str]:
    for library, one in answer.items():
        if not (one["reads its input"] and one["in another thread"]):
            yield f"A graph by {library} does not compute what is in its static input: {one}"


def _of_onnx(answer: dict[str, Any]) -> Iterator[str]:
    if "is right" not in answer:
        yield f"ONNX Runtime has no provider of CUDA here, only {', '.join(answer['providers'])}"
    elif not answer["is right"]:
        yield "ONNX Runtime's result is wrong"


def _of_compiled(answer: dict[str, Any]) -> Iterator[str]:
    for name, one in answer.items():
        if isinstance(one, str):
            yield f"torch.compile ({name}) fails: {one}"
        elif isinstance(one, dict) and one.get("in another thread", True) is not True:
            yield f"torch.compile ({name}) fails in another thread: {one['in another thread']}"


#: By the question.
_NOTES: Final[dict[str, Callable[[dict[str, Any]], Iterator[str]]]] = {
    one.__name__.removeprefix("_of_"): one
    for one in (
        _of_nvml, _of_page_locks, _of_locking, _of_bandwidth, _of_calls, _of_handles, _of_lock, _of_waits,
        _of_full_queue, _of_captures, _of_torch_facts, _of_torch_loop, _of_host_pointers,
        _of_bad_host_pointer, _of_two_processes, _of_small_instances, _of_shared_memory, _of_strided,
        _of_graphs, _of_onnx, _of_compiled,
    )
}  # fmt: skip
