"""Mistakes of an operator while clients are served: configurations that are reloaded."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.attacks.attacked import PLAIN_ECHO
from benchmarks.attacks.cases import Case, Judgement
from benchmarks.attacks.connections import Address, Victim

_TIMEOUT_S: Final = 30.0
#: How long a command that has to be refused may take.
_REFUSAL_S: Final = 10.0
#: Descriptors that the supervisor has left, up to this number: a reload fails at another place with each.
_MOST_SPARE: Final = 12
_GPUSERVE: Final = Path(sys.executable).parent / "gpuserve"
_DIGITS: Final = int("9" * 400)
_N_ENSEMBLES: Final = 2000
_ALIASES: Final = 9
#: Exit status of a command that failed; the documented ones are below.
_UNDOCUMENTED: Final = 7


class Done(NamedTuple):
    """A command that has ended: its exit status, what it has printed, and how long it took."""

    code: int
    output: str
    seconds: float


def operate(server: Address, verb: str, *arguments: str) -> Done:
    """Run a command for the server that listens there, and kill the command if it does not end."""
    began_s = time.monotonic()
    command = [str(_GPUSERVE), verb, "--server", f"{server[0]}:{server[1]}", *arguments]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Done(-9, "", _TIMEOUT_S)
    return Done(done.returncode, done.stdout, time.monotonic() - began_s)


def _reloads(victim: Victim, changes: Mapping[str, Callable[[dict[str, Any]], str]]) -> Iterator[Judgement]:
    """Reload each changed configuration, then the former one, as long as that can be reloaded."""
    victim.begin()
    config = Path(victim.config)
    good = config.read_text()
    for name, change in changes.items():
        config.write_text(change(json.loads(good)))
        yield _judged(f"reload with {name}", operate(victim.http, "reload"))
        config.write_text(good)
        after = _judged("reload of the former configuration", operate(victim.http, "reload"), is_fine=True)
        yield after
        yield _judged("status", operate(victim.http, "status"), is_fine=True)
        if not after.is_good:
            return


def _judged(name: str, done: Done, is_fine: bool = False, most_s: float = _TIMEOUT_S) -> Judgement:
    """Judge a command: it ends in time with a documented status, 0 if it is fine, and without a traceback."""
    is_documented = 0 <= done.code < _UNDOCUMENTED and "Traceback" not in done.output
    is_good = (done.code == 0 if is_fine else is_documented) and done.seconds < most_s
    said = "" if is_good else f": {done.output[-300:].strip()}"
    return Judgement(f"{name} ended after {done.seconds:.1f} s with {done.code}{said}", is_good)


def reload_digits(victim: Victim) -> Iterator[Judgement]:
    """Reload configurations with an integer of 400 digits."""

    def changed(where: str, key: str, document: dict[str, Any]) -> str:
        (document["server"] if where == "server" else document["models"][0])[key] = _DIGITS
        return json.dumps(document)

    keys = (("server", "drain_timeout_s"), ("server", "max_connections"), ("model", "execution_timeout_s"))
    return _reloads(victim, {f"400 digits in {key}": partial(changed, *(where, key)) for where, key in keys})


def reload_aliases(victim: Victim) -> Iterator[Judgement]:
    """Reload a configuration whose aliases of YAML stand for a thousand million texts."""

    def changed(document: dict[str, Any]) -> str:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, _ALIASES)]
        return "\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in document.items())])

    def in_model(document: dict[str, Any]) -> str:
        return changed(document).replace('"callable"', f'"kwargs": {{"a": *a{_ALIASES - 1}}}, "callable"')

    return _reloads(victim, {"aliases": changed, "aliases in a model": in_model})


def reload_chain(victim: Victim) -> Iterator[Judgement]:
    """Reload a configuration with a chain of 2,000 ensembles."""

    def changed(document: dict[str, Any]) -> str:
        tensors = {key: PLAIN_ECHO[key] for key in ("inputs", "outputs", "max_batch_size")}
        for n in range(_N_ENSEMBLES):
            step = {"model": document["models"][-1]["name"], "inputs": {"x": "x"}, "outputs": {"y": "y"}}
            document["models"].append({"name": f"chain{n}", "ensemble": {"steps": [step]}, **tensors})
        return json.dumps(document)

    return _reloads(victim, {"2,000 ensembles": changed})


def reload_descriptors(victim: Victim) -> Iterator[Judgement]:
    """Reload a configuration with more instances while the supervisor has no descriptor left."""

    def changed(document: dict[str, Any]) -> str:
        document["models"][0]["instances"] = 3
        return json.dumps(document)

    victim.begin()
    before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    for spare in range(_MOST_SPARE):
        n_open = len(os.listdir(f"/proc/{victim.pid}/fd"))
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (n_open + spare, before[1]))
        done = _reload_of(victim, changed)
        yield _judged(f"reload with {spare} descriptors left", done, most_s=_REFUSAL_S)
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, before)
    yield from _reloads(victim, {"descriptors again": changed})


def _reload_of(victim: Victim, change: Callable[[dict[str, Any]], str]) -> Done:
    config = Path(victim.config)
    good = config.read_text()
    config.write_text(change(json.loads(good)))
    done = operate(victim.http, "reload")
    config.write_text(good)
    return done


CASES: Final = {
    attack.__name__.replace("_", "-"): Case(attack, by_operator=True)
    for attack in (reload_digits, reload_aliases, reload_chain, reload_descriptors)
}
