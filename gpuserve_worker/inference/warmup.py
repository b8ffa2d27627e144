"""Warm-up batches: from the declared warm-ups of a model, as in ``wire.Init.warmup``, to the batches that an
instance runs before it is ready. The declaration was checked against the model earlier. Pure, except for
reading the named files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.protocol.payloads import WireRequest
from gpuserve_worker.protocol.tensor import BYTES, bytes_array, element_count, fits_shape, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Suffixes of numpy's files; other files contain the bytes of a tensor.
_NUMPY: Final = (".npy", ".npz")
#: Random integers of these datatypes use their whole range; others are small, as identifiers are.
_WHOLE_RANGE: Final = frozenset({"INT8", "UINT8", "INT16", "UINT16"})
_SMALL_INTEGERS: Final = 100
#: Lengths and characters of random byte strings.
_SHORTEST: Final = 8
_LONGEST: Final = 32
_LETTERS: Final = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", np.uint8)
#: A fixed seed, so that an instance that fails in its warm-up fails again.
_SEED: Final = 0


class WarmupTensor(NamedTuple):
    """One input of a warm-up. ``shape`` excludes the batch axis; ``values`` is "zero", "random" or "file"."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: str
    path: str


class Warmup(NamedTuple):
    """A batch of one request with ``batch_size`` rows, which is run ``times`` times."""

    name: str
    batch_size: int
    times: int
    inputs: tuple[WarmupTensor, ...]


def warmups(raw: Iterable[Sequence[Any]]) -> tuple[Warmup, ...]:
    """Return a decoded field of warm-ups with its classes restored."""
    return tuple(
        Warmup(name, batch_size, times, tuple(WarmupTensor(*one) for one in inputs))
        for name, batch_size, times, inputs in raw
    )


def warmup_batches(raw: Iterable[Sequence[Any]], model: ModelContext) -> Iterator[Batch]:
    for warmup in warmups(raw):
        yield from batches(warmup, model)


def batches(warmup: Warmup, model: ModelContext) -> Iterator[Batch]:
    """Return the same batch ``times`` times, each with its own arrays, because callables may write to them.
    Raise ``ValueError`` with one sentence if an input cannot be made.
    """
    rows = warmup.batch_size if model.batching else None
    made = {one.name: _array(warmup.name, one, rows) for one in warmup.inputs}
    for _ in range(warmup.times):
        arrays = {name: array.copy() for name, array in made.items()}
        request = WireRequest(1 if rows is None else rows, {}, ())
        yield Batch(arrays, [request], tuple(spec.name for spec in model.outputs), rows is not None)


def _array(warmup: str, given: WarmupTensor, rows: int | None) -> NDArray[Any]:
    """Return the input's values, ``[rows, …]``, or without a batch axis if ``rows`` is None."""
    where = f"Warm-up {warmup!r}: input {given.name!r}"
    if given.values == "file":
        return _from_file(where, given, rows)
    shape = given.shape if rows is None else (rows, *given.shape)
    if min(shape, default=0) < 0:
        raise ValueError(f"{where} must have a size on every axis, but its shape is {list(given.shape)}")
    if given.values == "zero":
        return np.full(shape, b"" if given.datatype == BYTES else 0, numpy_dtype(given.datatype))
    if given.values == "random":
        return np.asarray(_random(given.datatype, shape))
    raise ValueError(f"{where} must have zero, random or file values, got {given.values!r}")


def _random(datatype: str, shape: tuple[int, ...]) -> Any:
    generator = np.random.default_rng(_SEED)
    dtype = numpy_dtype(datatype)
    if datatype == BYTES:
        count = element_count(shape)
        lengths = generator.integers(_SHORTEST, _LONGEST, count, endpoint=True)
        array = np.empty(count, object)
        array[:] = [generator.choice(_LETTERS, length).tobytes() for length in lengths]
        return array.reshape(shape)
    if dtype.kind == "b":
        return generator.random(shape) < 0.5
    if datatype in _WHOLE_RANGE:
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype.kind in "iu":
        return generator.integers(0, _SMALL_INTEGERS, shape, dtype)
    return np.asarray(generator.random(shape)).astype(dtype)


def _from_file(where: str, given: WarmupTensor, rows: int | None) -> NDArray[Any]:
    if not given.path.endswith(_NUMPY):
        return _of_rows(where, _raw(where, given), given, rows)
    try:
        loaded = np.load(given.path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is no .npy file of numbers or byte strings"
        raise ValueError(f"{where}: the file {given.path} cannot be read: {reason}") from None
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise ValueError(f"{where}: the file {given.path} is an .npz archive; expected one array (.npy)")
    return _cast(where, _of_rows(where, loaded, given, rows), given)


def _raw(where: str, given: WarmupTensor) -> NDArray[Any]:
    """Return a file's bytes as one sample in requests' layout, as Triton's warm-up files are."""
    try:
        with open(given.path, "rb") as file:
            data = file.read()
        if given.datatype == BYTES:
            return bytes_array(data, given.shape)
        return np.frombuffer(data, numpy_dtype(given.datatype)).reshape(given.shape)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError:
        problem = (
            f"has {len(data)} bytes, which are no {given.datatype} of shape {list(given.shape)}; expected "
            "just the bytes of one sample, or a .npy file"
        )
    raise ValueError(f"{where}: the file {given.path} {problem}")


def _of_rows(where: str, loaded: NDArray[Any], given: WarmupTensor, rows: int | None) -> NDArray[Any]:
    """Return the file's array with a batch axis of ``rows``: its own axis, cut or repeated, or a new axis."""
    if rows is None:
        if fits_shape(loaded.shape, given.shape):
            return loaded
    elif fits_shape(loaded.shape, given.shape):
        return np.repeat(loaded[np.newaxis], rows, axis=0)
    elif loaded.ndim and len(loaded) and fits_shape(loaded.shape[1:], given.shape):
        return np.resize(loaded, (rows, *loaded.shape[1:]))
    sample = ", ".join(map(str, given.shape))
    expected = f"[{sample}]" if rows is None else f"[{sample}] or, with rows, [{f'n, {sample}'.rstrip(', ')}]"
    raise ValueError(
        f"{where}: the array in the file {given.path} must have the shape {expected}, "
        f"but its shape is {list(loaded.shape)}"
    )


def _cast(where: str, array: NDArray[Any], given: WarmupTensor) -> NDArray[Any]:
    if given.datatype == BYTES:
        if array.dtype.kind == "U":
            array = np.char.encode(array, "utf-8")
        if array.dtype.kind == "S":
            return array.astype(object)
    elif array.dtype.kind in "biuf":
        return array.astype(numpy_dtype(given.datatype))
    raise ValueError(
        f"{where}: the file {given.path} must hold {given.datatype} values, but holds {array.dtype.name}"
    )
