"""Greets in the language that a request asks for, on behalf of the tenant that a proxy put into a header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve import Request, Response, errors
from gpuserve.decorators import batch

GREETINGS = {"en": "Hello", "de": "Guten Tag", "ja": "こんにちは"}


def greet(requests: Sequence[Request]) -> list[Any]:
    """``name``: bytes [rows, 1]; the parameters ``language`` and, forwarded, ``x-tenant``.

    Parameters belong to a request, so this function sees the requests; what is computed for all rows of
    one is done by a function over arrays. An exception in the list answers only its own request; a
    ``Response`` has parameters as well.
    """
    return [_answer(request) for request in requests]


def _answer(request: Request) -> Any:
    language = request.parameters.get("language", "en")
    if language not in GREETINGS:
        return errors.InvalidArgument(f"language must be one of {', '.join(GREETINGS)}, got {language!r}")
    tenant = request.parameters.get("x-tenant", "nobody")
    (outputs,) = _greetings([request])
    signed = [[text + f" ({tenant})".encode()] for (text,) in outputs["greeting"].tolist()]
    words = np.array([[GREETINGS[language].encode() + b", " + text] for (text,) in signed], dtype=object)
    return Response({"greeting": words}, parameters={"language": language, "names": len(words)})


@batch
def _greetings(name: NDArray[np.object_]) -> dict[str, NDArray[np.object_]]:
    tidy = [[one.strip().title()] for (one,) in name.tolist()]
    return {"greeting": np.array(tidy, dtype=object)}
