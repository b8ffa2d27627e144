"""What holds for every test: it leaves nothing behind (``leaks.py`` says what that is)."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import ingress
import leaks
import long_turns
import pytest
from exploring import examples
from hypothesis import HealthCheck, settings

from gpuserve_worker.memory.arena import ORPHANS

# How fast examples are made says something about the machine, and nothing about what is tested.
settings.register_profile(
    "any machine", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# OpenBLAS starts a thread a core with every numpy, and each spins before it sleeps: a fifth of a worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Without it onnxruntime keeps a database open in which it collects what it sends to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Servers of tests have no runtime folder, unless the test makes one.
os.environ.pop("XDG_RUNTIME_DIR", None)

ingress.set_environment()
long_turns.tell_servers()

# Servers of the tests take these two, and a shell that runs the tests in the background ignores them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose tests are all thorough where those do not run: it may import large libraries."""
    if config.option.markexpr != "not thorough" or not collection_path.name.startswith("test_"):
        return None
    return b"\npytestmark = pytest.mark.thorough" in collection_path.read_bytes() or None


def pytest_collection_finish() -> None:
    """What was collected stays: collections, Python's own and those that tests ask for, need not walk it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, or each example of it, on an event loop of its own."""
    by_example = getattr(pyfuncitem.obj, "hypothesis", None)
    if by_example is not None and inspect.iscoroutinefunction(coroutine := by_example.inner_test):
        by_example.inner_test = lambda *args, **kwargs: asyncio.run(coroutine(*args, **kwargs))
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def _no_turn_is_long() -> Iterator[None]:
    """Fails the test in which an event loop of a server had a turn over the limit."""
    long_turns.since_last()
    yield
    found = long_turns.since_last()
    assert not found, "turns of event loops over the limit:\n" + "\n".join(found)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test after which a process, descriptor, shared memory or socket file is left."""
    mark = uuid.uuid4().hex
    os.environ[leaks.MARK] = mark
    before = leaks.census(mark)
    yield
    del os.environ[leaks.MARK]
    ORPHANS.reclaim()  # as an event loop does, of blocks that the test did not free
    # A server keeps the memory of its bound models, because it may run again.
    request.node.funcargs.clear()
    found = leaks.leaks(before)
    for pid in leaks.processes(before) if found else ():
        os.kill(pid, signal.SIGKILL)
    assert not found, "the test left behind:\n" + "\n".join(found)
