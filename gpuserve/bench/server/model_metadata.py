"""What a server says of a model, and the shapes that a request to it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve_worker.protocol.tensor import element_count

#: No tensor of a made-up request has more elements: it would be a slip of the finger.
_MAX_ELEMENTS = 1 << 32


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor as the server describes it: with the batch axis where the model batches; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model under load. ``max_batch_size`` 0: no batch axis, or the server does not say."""

    name: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    max_batch_size: int = 0
    decoupled: bool = False


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes as in ``name:3,224,224``, where nothing behind the colon is no axes; else BenchOptionError."""
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, colon, dims = text.rpartition(":")
        try:
            shape = tuple(int(dim) for dim in dims.split(",")) if dims else ()
        except ValueError:
            shape = (-1,)
        if not (colon and name) or any(dim < 0 for dim in shape):
            raise BenchOptionError("--shape", f"expected name:3,224,224, given {text!r}")
        if name in found:
            raise BenchOptionError("--shape", f"{name!r} is given twice")
        found[name] = shape
    return found


def request_shapes(
    model: TargetModel, shapes: Mapping[str, tuple[int, ...]], batch_size: int
) -> dict[str, tuple[int, ...]]:
    """The full shape of every input that a request brings; ``shapes`` are without the batch axis, and
    optional inputs are left out unless they are there. BenchOptionError: a shape is missing or does not fit.
    """
    known = {one.name for one in model.inputs}
    for name in shapes:
        if name not in known:
            raise BenchOptionError(
                "--shape",
                f"model {model.name!r} has no input {name!r}, only {', '.join(sorted(known)) or 'none'}",
            )
    _check_batch(model, batch_size)
    return {
        one.name: _request_shape(model, one, shapes.get(one.name), batch_size)
        for one in model.inputs
        if not one.optional or one.name in shapes
    }


def _check_batch(model: TargetModel, batch_size: int) -> None:
    if batch_size < 1:
        raise BenchOptionError("--batch-size", f"expected at least 1, given {batch_size}")
    if not model.max_batch_size and batch_size > 1:
        raise BenchOptionError("--batch-size", f"model {model.name!r} does not batch, given {batch_size}")
    if model.max_batch_size and batch_size > model.max_batch_size:
        raise BenchOptionError(
            "--batch-size", f"model {model.name!r} takes at most {model.max_batch_size}, given {batch_size}"
        )


def _request_shape(
    model: TargetModel, tensor: TensorMetadata, given: tuple[int, ...] | None, batch_size: int
) -> tuple[int, ...]:
    batch = (batch_size,) if model.max_batch_size else ()
    declared = tensor.shape[1:] if batch else tensor.shape
    shape = declared if given is None else given
    if len(shape) != len(declared) or any(
        dim not in {-1, got} for dim, got in zip(declared, shape, strict=False)
    ):
        raise BenchOptionError(
            "--shape", f"input {tensor.name!r} has the shape {list(declared)}, given {list(shape)}"
        )
    if -1 in shape:
        example = ",".join(str(dim) if dim >= 0 else "16" for dim in declared)
        raise BenchOptionError(
            "--shape",
            f"input {tensor.name!r} has the shape {list(declared)}, where -1 is any size: "
            f"give one, such as --shape {tensor.name}:{example}",
        )
    if element_count((*batch, *shape)) > _MAX_ELEMENTS:
        raise BenchOptionError(
            "--shape", f"input {tensor.name!r} would have more than {_MAX_ELEMENTS} elements"
        )
    return (*batch, *shape)
