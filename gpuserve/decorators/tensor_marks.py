"""Marks for ``Annotated`` that describe the tensor of an argument or of a result."""

from __future__ import annotations

from typing import Any


class Shape:
    """The shape of a tensor, without the batch axis if the model batches; -1 is any size.

    ``Annotated[Float32, Shape(3, 224, 224)]``; a tensor without a ``Shape`` has one axis of any size. The
    requests of a batch may differ in the sizes of -1 of a ``ragged`` tensor: ``Shape(-1, ragged=True)``.
    """

    __slots__ = ("dims", "ragged")

    def __init__(self, *dims: int, ragged: bool = False) -> None:
        self.dims = dims
        self.ragged = ragged

    def __repr__(self) -> str:
        parts = [*map(repr, self.dims), *(["ragged=True"] if self.ragged else [])]
        return f"Shape({', '.join(parts)})"


class DType:
    """The dtype of a tensor whose type has none: ``Annotated[torch.Tensor, DType("float32")]``."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"DType({self.dtype!r})"


class Name:
    """The name of a single output: ``-> Annotated[Float32, Name("scores")]``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Name({self.name!r})"
