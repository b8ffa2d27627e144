"""Callables whose inputs are on the GPU, as CuPy arrays."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

from gpuserve.decorators import batch, fill_optionals, first_value, group_by_values, pad_batch, sample
from gpuserve_worker.cuda.device.host_memory import PageLocker
from gpuserve_worker.inference.model_context import current_model


@batch
def doubled(x: Any) -> dict[str, Any]:
    return {"y": x * 2}


@batch
async def doubled_async(x: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"y": x * 2}


@batch
def unchanged(**inputs: Any) -> dict[str, Any]:
    """Every input as it came, which is a view of the server's own buffer."""
    return dict(inputs)


@batch
def passed_on(x: Any) -> dict[str, Any]:
    """The input as it came, after a kernel."""
    x + 1
    return {"y": x}


def passed_on_by_request(requests: Any) -> list[dict[str, Any]]:
    """The same, of a view of it."""
    requests[0]["x"] + 1
    return [{"y": one["x"]} for one in requests]


class StaticAddresses:
    """Answers with the address of its input as well. Its last batch is not disturbed by the next one."""

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        return {"y": x * 2, "address": np.full((len(x), 1), x.data.ptr, np.int64)}


class CountsCalls:
    """Answers with the questions after events and the other calls of CUDA since its last call."""

    def __init__(self) -> None:
        self._before = np.zeros(2, np.int64)

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        since = self._counts() - self._before
        y = x * 2
        self._before = self._counts()
        return {"y": y, "calls": np.tile(since, (len(x), 1))}

    def _counts(self) -> Any:
        from cuda_simulation.context import current

        calls = {name: count for name, count in current().calls.items() if not name.startswith("_")}
        queries = calls.pop("eventQuery", 0)
        return np.array([queries, sum(calls.values())])


@batch
def counts_kernels(x: Any) -> dict[str, Any]:
    """How many kernels this process has compiled before; the server casts its output."""
    from cuda_simulation.context import current

    return {"y": (x * 2).astype(np.float64), "calls": np.full((len(x), 2), len(current().compiled))}


class KeepsItsInput:
    """Answers with its input, and writes to it in the next call."""

    def __init__(self) -> None:
        self._last: Any = None

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        if self._last is not None:
            self._last.fill(-1)
        self._last = x
        return {"y": x}


@sample
def unchanged_sample(**inputs: Any) -> dict[str, Any]:
    return dict(inputs)


def kinds(requests: Any) -> list[dict[str, Any]]:
    """What each input is: 1 for an array of CuPy, 0 for one of numpy."""
    return [
        {"y": np.full((len(one["x"]), 1), type(one["x"]).__module__.startswith("cupy"), np.float32)}
        for one in requests
    ]


def in_place(requests: Any) -> list[dict[str, Any]]:
    """The inputs are written to; each request has rows of its own."""
    answers = []
    for number, request in enumerate(requests):
        request["x"] += number
        answers.append({"y": request["x"]})
    return answers


class Keeps:
    """Answers with the sum of all inputs there ever were, each of which it has kept."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, requests: Any) -> list[dict[str, Any]]:
        answers = []
        for request in requests:
            self.kept.append(request["x"])
            total = self.kept[0] * 1
            for one in self.kept[1:]:
                total = total + one
            answers.append({"y": total})
        return answers


class Interface:
    """An array of another library, which the stream ``stream`` is still at work on."""

    def __init__(self, array: Any, stream: Any = None) -> None:
        self.array = array
        self.stream = stream
        described = dict(array.__cuda_array_interface__)
        described["stream"] = None if stream is None else stream.ptr
        self.__cuda_array_interface__ = described


class Capsule:
    """An array of another library that speaks DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Answers:
    """Answers with the doubled input in one form or another."""

    def __init__(self, form: str) -> None:
        import cupy

        self.cupy = cupy
        self.form = getattr(self, form)
        self.static: Any = None
        if form.endswith("own_stream"):  # the current one of the thread that makes the calls, for good
            cupy.cuda.Stream(non_blocking=True).use()

    def __call__(self, requests: Any) -> list[dict[str, Any]]:
        return [{"y": self.form(one["x"], number)} for number, one in enumerate(requests)]

    def as_double(self, x: Any, number: int) -> Any:
        return x.astype(np.float64) * 2

    def as_integers(self, x: Any, number: int) -> Any:
        return (x * 2).astype(np.int32)

    def strided(self, x: Any, number: int) -> Any:
        return self.cupy.ascontiguousarray((x * 2).T).T

    def every_other(self, x: Any, number: int) -> Any:
        wide = self.cupy.zeros((x.shape[0], 2 * x.shape[1]), np.float32)
        wide[:, ::2] = x * 2
        return wide[:, ::2]

    def interface(self, x: Any, number: int) -> Any:
        return Interface(x * 2)

    def interface_on_a_stream(self, x: Any, number: int) -> Any:
        stream = self.cupy.cuda.Stream(non_blocking=True)
        self.cupy.cuda.get_current_stream().synchronize()
        with stream:
            answer = x * 2
        return Interface(answer, stream)

    def capsule(self, x: Any, number: int) -> Any:
        return Capsule(x * 2)

    def on_host(self, x: Any, number: int) -> Any:
        return (x * 2).get()

    def mixed(self, x: Any, number: int) -> Any:
        return (x * 2).get() if number % 2 else x * 2

    def masked(self, x: Any, number: int) -> Any:
        given = Interface(x * 2)
        given.__cuda_array_interface__["mask"] = given
        return given

    def complex(self, x: Any, number: int) -> Any:
        return x.astype(np.complex64)

    def too_long(self, x: Any, number: int) -> Any:
        return self.cupy.concatenate([x, x])

    def other_shape(self, x: Any, number: int) -> Any:
        return (x * 2)[:, :1].reshape(-1, 1, 1)

    def kept(self, x: Any, number: int) -> Any:
        """The same buffer every time, as a graph of kernels has it."""
        if self.static is None:
            self.static = self.cupy.empty_like(x)
        self.static[...] = x * 2
        return self.static

    def part_of_kept(self, x: Any, number: int) -> Any:
        if self.static is None:
            self.static = self.cupy.empty((8, *x.shape[1:]), x.dtype)
        self.static[: len(x)] = x * 2
        return self.static[: len(x)]

    def on_own_stream(self, x: Any, number: int) -> Any:
        return x * 2

    def double_on_own_stream(self, x: Any, number: int) -> Any:
        return (x * 2).astype(np.float64)

    def capsule_on_own_stream(self, x: Any, number: int) -> Any:
        return Capsule(x * 2)

    def kept_on_own_stream(self, x: Any, number: int) -> Any:
        return self.kept(x, number)

    def elsewhere(self, x: Any, number: int) -> Any:
        """On another device of the process."""
        with self.cupy.cuda.Device(1):
            return self.cupy.zeros(x.shape, x.dtype)

    def raises(self, x: Any, number: int) -> Any:
        raise ValueError("as the test wants")


def total(requests: Any) -> list[dict[str, Any]]:
    """An array without an axis, and of another type."""
    return [{"y": one["x"].astype(np.float64).sum()} for one in requests]


async def waits(requests: Any) -> list[dict[str, Any]]:
    await asyncio.sleep(0)
    return [{"y": one["x"] * 2} for one in requests]


def counts_up(requests: Any) -> Iterator[list[dict[str, Any]]]:
    """Three responses to each request."""
    for number in range(3):
        yield [{"y": one["x"] * number} for one in requests]


async def counts_up_async(requests: Any) -> AsyncIterator[list[dict[str, Any]]]:
    for number in range(3):
        await asyncio.sleep(0)
        yield [{"y": one["x"] * number} for one in requests]


@batch
@group_by_values("k")
def grouped(x: Any, k: Any) -> dict[str, Any]:
    return {"y": x * 2 + k}


@batch
@pad_batch
def padded(x: Any) -> dict[str, Any]:
    return {"y": x * len(x)}


@batch
@first_value("k")
def first(x: Any, k: Any) -> dict[str, Any]:
    assert isinstance(k, np.float32)
    return {"y": x * k}


@fill_optionals(k=np.array([3], np.float32))
@batch
def filled(x: Any, k: Any) -> dict[str, Any]:
    assert type(k) is type(x)
    return {"y": x * k}


@batch
def asks_doubled(x: Any) -> dict[str, Any]:
    """Asks another model with an array of the device."""
    answer = current_model().infer("doubled", {"x": x + 1})
    return {"y": answer["y"]}


class Warmed:
    """Answers with the number of calls it had before, all of them with inputs on the device."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, requests: Any) -> list[dict[str, Any]]:
        assert all(type(one["x"]).__module__.startswith("cupy") for one in requests)
        self.calls += 1
        return [{"y": one["x"] * 0 + self.calls - 1} for one in requests]


@batch
def numpy_doubled(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """On a GPU worker, with inputs on the host as ever."""
    assert isinstance(x, np.ndarray)
    return {"y": x * 2}


@batch
def numpy_to_device(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Inputs on the host, outputs on the device."""
    import cupy

    return {"y": cupy.asarray(x) * 2}


class LentLimit:
    """Answers how much of what clients lend may be page-locked by the worker."""

    def __init__(self) -> None:
        (locks,) = [one for one in gc.get_objects() if isinstance(one, PageLocker)]
        self._nbytes = locks._lent_left_nbytes

    def __call__(self, requests: Any) -> list[dict[str, Any]]:
        return [{"y": np.full((1, 1), self._nbytes, np.int64)} for _ in requests]


@batch
def row_sums(x: Any) -> dict[str, Any]:
    return {"y": x.sum(axis=1, keepdims=True)}
