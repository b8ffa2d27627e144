"""What an inference callable can ask of its server, in the form that it travels in: an answer of another
model, or something about the models themselves. How it is asked, and who waits, is in ``calls.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

from gpuserve_worker.calling.response import PARAMETER, is_parameter

#: Of a value that is wrong, so much is told.
_SHOWN: Final = 64
#: What a ``ModelCommand`` may say.
LOAD: Final = "load"
UNLOAD: Final = "unload"
READY: Final = "ready"


class _Code(NamedTuple):
    value: str


class ModelCallError(Exception):
    """Another model could not answer. ``code`` is one of ``errors.Code``: a callable that lets the exception
    pass fails its own request with it.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = _Code(code)


class CallOptions(TypedDict, total=False):
    """What may be said of a call besides the model and its inputs.

    ``version`` of the model, the newest by default; ``requested_outputs``, all by default; ``parameters`` of
    the request; ``timeout_s``, a limit of the call's own, none by default; ``request_id``, which the model is
    told; ``sequence_id`` of the sequence that it belongs to, 0 or "" for none, which it may start or end.
    """

    version: str | int
    requested_outputs: Sequence[str]
    parameters: Mapping[str, Any] | None
    timeout_s: float | None
    request_id: str
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


class CallRequest(NamedTuple):
    """What is asked of a model. ``blocks``: the thread that asks does nothing else meanwhile. ``sequence``
    is its id, and whether the request starts and ends it.
    """

    model: str
    version: str
    inputs: Mapping[str, Any]
    requested_outputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    timeout_s: float
    stream: bool
    blocks: bool
    request_id: str = ""
    sequence: tuple[int | str, bool, bool] | None = None


class ModelCommand(NamedTuple):
    """What is to be done with a model, or told of it: ``verb`` is LOAD, UNLOAD or READY."""

    verb: str
    model: str
    parameters: Mapping[str, Any]


Question: TypeAlias = CallRequest | ModelCommand


def call_request(
    model: str,
    inputs: Mapping[str, Any],
    *,
    stream: bool,
    blocks: bool,
    version: str | int = "",
    requested_outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    request_id: str = "",
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> CallRequest:
    """A call in the form that it travels in. Raises ``ModelCallError`` where it cannot travel."""
    _check(isinstance(model, str), "the name of a model that is called", "a str", model)
    _check(isinstance(inputs, Mapping), f"the inputs of a call to model {model!r}", "arrays by name", inputs)
    asked = tuple(requested_outputs) if not isinstance(requested_outputs, str) else (requested_outputs,)
    for name in asked:
        _check(isinstance(name, str), f"an output asked of model {model!r}", "a str", name)
    given = dict(parameters or {})
    for name, value in given.items():
        what = f"parameter {name!r} of a call to model {model!r}"
        _check(isinstance(name, str) and is_parameter(name) and is_parameter(value), what, PARAMETER, value)
    limit_s = 0.0 if timeout_s is None else timeout_s
    is_limit = timeout_s is None or (isinstance(limit_s, int | float) and 0 < limit_s < math.inf)
    _check(is_limit, f"timeout_s of a call to model {model!r}", "a positive number", timeout_s)
    _check(isinstance(request_id, str), f"request_id of a call to model {model!r}", "a str", request_id)
    is_id = isinstance(sequence_id, str) or (type(sequence_id) is int and 0 <= sequence_id < 1 << 64)
    what = f"sequence_id of a call to model {model!r}"
    _check(is_id, what, "a str, or an int of 64 bits that is not negative", sequence_id)
    sequence = (sequence_id, bool(sequence_start), bool(sequence_end)) if sequence_id else None
    return CallRequest(
        model, str(version), inputs, asked, given, float(limit_s), stream, blocks, request_id, sequence
    )


def command(verb: str, model: str, **parameters: str | bool) -> ModelCommand:
    """A command in the form that it travels in. Raises ``ModelCallError`` where it cannot travel."""
    _check(isinstance(model, str), f"the name of a model to {verb}", "a str", model)
    for name, value in parameters.items():
        _check(isinstance(value, str | bool), f"{name} of model {model!r}", "a str, or a bool", value)
    return ModelCommand(verb, model, parameters)


def _check(fits: bool, what: str, expected: str, given: Any) -> None:
    if not fits:
        shown = repr(given)[:_SHOWN]
        raise ModelCallError("INVALID_ARGUMENT", f"{what}: expected {expected}, got {shown}")
