"""Limits on one request, and safe forms of names and shapes from outside for error texts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import InvalidArgument, ResourceExhausted
from gpuserve.core.suggestions import nearest

MAX_INPUTS: Final = 1024
MAX_OUTPUTS: Final = 1024
MAX_PARAMETERS: Final = 256
#: Limit of a parameter's key, and of a model name that is needed while a body still arrives, in bytes.
MAX_NAME_NBYTES: Final = 256
#: Limit of a request beside its tensors: its id and its parameters, which are echoed and sent on.
MAX_TEXTS_NBYTES: Final = 4 << 20
_SHOWN_CHARACTERS: Final = 128
_SHOWN_ITEMS: Final = 16
_SHOWN_NUMBER: Final = 10**20
#: At most this many names are compared with an unknown name, which bounds the cost of a bad request.
_COMPARED: Final = 64


class InflationLimits(NamedTuple):
    """Limits of inflating a compressed body or message: total bytes, and bytes for each compressed byte."""

    nbytes: int
    ratio: int

    def within(self, nbytes: int) -> InflationLimits:
        """Return these limits with at most ``nbytes`` in total."""
        return self._replace(nbytes=min(self.nbytes, nbytes))


def shown(text: str) -> str:
    """Return a name from outside for an error text: shortened, escaped, on one line."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def shown_names(names: Iterable[str]) -> str:
    """Return names as ``['A','B']``, cut after the first few."""
    items = [f"'{shown(name)}'" for name in names]
    if len(items) > _SHOWN_ITEMS:
        items = [*items[:_SHOWN_ITEMS], f"… {len(items)} in all"]
    return f"[{','.join(items)}]"


def suggested(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean '…'?`` with the most similar known name, or "" if none is similar."""
    if len(name) > _SHOWN_CHARACTERS:
        return ""
    return nearest(name, islice(known, _COMPARED))


def shown_dim(dim: int) -> str:
    """Return a number from outside as text. An integer in JSON may have thousands of digits."""
    return str(dim) if abs(dim) < _SHOWN_NUMBER else "a number of over 20 digits"


def shown_shape(shape: Sequence[int]) -> str:
    """Return a shape as ``[1,16]``, cut after the first few dimensions."""
    first = [shown_dim(dim) for dim in shape[: _SHOWN_ITEMS + 1]]
    if len(shape) > _SHOWN_ITEMS:
        return f"[{','.join(first[:_SHOWN_ITEMS])},… {len(shape)} dimensions]"
    return f"[{','.join(first)}]"


def check_count(what: str, given: int, most: int, model_name: str) -> None:
    """Raise InvalidArgument for more of ``what`` ("inputs", "parameters") than the server reads."""
    if given > most:
        raise InvalidArgument(
            f"the request for model '{shown(model_name)}' has {given} {what}, expected at most {most}"
        )


def check_entries(what: str, given: Sized) -> None:
    """Raise InvalidArgument for more of ``what`` ("settings") than a request may have parameters."""
    if len(given) > MAX_PARAMETERS:
        raise InvalidArgument(f"the request has {len(given)} {what}, expected at most {MAX_PARAMETERS}")


def check_texts(request_id: str, parameters: Mapping[str, Any]) -> None:
    """Raise ResourceExhausted if the id and the text parameters together are too long."""
    n = len(request_id) + sum(len(one) for one in parameters.values() if isinstance(one, str))
    if n > MAX_TEXTS_NBYTES:
        raise ResourceExhausted(
            f"the id and the parameters of the request have {n} characters, expected at most "
            f"{MAX_TEXTS_NBYTES}. Please send large values as tensors"
        )


def check_parameter_name(name: str, model_name: str) -> None:
    """Raise InvalidArgument if a name has more than ``MAX_NAME_NBYTES`` bytes of UTF-8: no known name has."""
    # A character is at most four bytes, so only few names have to be encoded to be measured.
    if len(name) > MAX_NAME_NBYTES // 4 and len(name.encode("utf-8", "replace")) > MAX_NAME_NBYTES:
        raise InvalidArgument(
            f"parameter '{shown(name)}' for model '{shown(model_name)}' is longer than the "
            f"{MAX_NAME_NBYTES} bytes a name may have, got {len(name)} characters"
        )
