"""What an inference callable gives for a request where outputs alone do not say all. Nothing of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What a parameter may be, in words.
PARAMETER: Final = "a bool, an int of 64 bits, a float or a str"
_INT64: Final = range(-(1 << 63), 1 << 63)


def is_parameter(value: Any) -> bool:
    """Whether every protocol can carry a value as a parameter."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)
    if isinstance(value, int):
        return int(value) in _INT64
    return isinstance(value, float)


class StreamStep(list[Any]):
    """What a stream gives at once: a response or None for each request of its batch. ``last`` are the
    positions of those that have ended: what is here for them is their last response.
    """

    def __init__(self, responses: Iterable[Any], last: tuple[int, ...] = ()) -> None:
        super().__init__(responses)
        self.last = last


class Response(Mapping[str, "NDArray[Any]"]):
    """The outputs of one request, by name, and parameters that the client is told beside them.

    It may stand wherever a callable gives the mapping of one request::

        return [gpuserve.Response({"y": y}, parameters={"tokens": 12})]

    ``parameters`` are bool, int (64 bits), float or str, by name.
    """

    __slots__ = ("data", "parameters")

    def __init__(
        self,
        data: Mapping[str, NDArray[Any]],
        parameters: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        self.data = dict(data)
        self.parameters = dict(parameters or {})

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {getattr(one, 'shape', '?')}" for name, one in self.data.items())
        return f"Response({shapes}, parameters={self.parameters})"
