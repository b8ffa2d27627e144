"""The known word that is most like a wrong one, and errors of calls with wrong arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

_Called = TypeVar("_Called", bound=Callable[..., Any])

#: Words of other programs, with the words here that mean the same.
SYNONYMS: Final[Mapping[str, tuple[str, ...]]] = {
    "port": ("http_port",),
    "address": ("host",),
    "stream": ("decoupled",),
    "streaming": ("decoupled",),
    "gpu": ("device", "instances", "cuda"),
    "cpu": ("host",),
    "ram": ("host",),
    "gpus": ("device", "instances"),
    "workers": ("instances", "count"),
    "replicas": ("instances", "count"),
    "instance_group": ("instances",),
    "batch_size": ("max_batch_size",),
    "max_batch": ("max_batch_size",),
    "timeout": ("execution_timeout_s", "default_timeout_us"),
    "max_delay": ("max_queue_delay_us",),
    "delay": ("max_queue_delay_us",),
    "type": ("dtype",),
    "datatype": ("dtype",),
    "dims": ("shape",),
    "shared_weights": ("kwargs",),
    "path": ("callable",),
    "model": ("callable",),
    "ingress": ("ingress_processes",),
    "cert": ("tls_certfile",),
    "token": ("access_token",),
}
_UNIT_WORDS: Final = {"us": "microseconds", "ms": "milliseconds", "s": "seconds", "nbytes": "bytes"}


def nearest(word: str, known: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """Return ``; did you mean '…'?`` with the known word that is most like this one, or "" if none is. Words
    of other programs mean their synonyms. The text has the unit if the word names another one. ``places`` are
    the texts to show for the known words.
    """
    import difflib

    folded = {candidate.casefold(): candidate for candidate in known}
    close = [one for one in SYNONYMS.get(word.casefold(), ()) if one in folded]
    close = close or difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    if not close:
        return ""
    found = folded[close[0]]
    unit = _UNIT_WORDS.get(found.rpartition("_")[2])
    changes = unit is not None and word.rpartition("_")[2] != found.rpartition("_")[2]
    shown = found if places is None else places[found]
    return f"; did you mean {shown!r}{f', in {unit}' if changes else ''}?"


def explained(called: _Called, /, **objects: Callable[..., Any]) -> _Called:
    """Name, in the TypeError of a call with wrong arguments, the callable as users call it, and the nearest
    keyword. A decorator of functions, methods and classes. ``objects`` are the classes of the arguments that
    may have the wrong keyword instead.
    """
    function: Any = vars(called)["__init__"] if isinstance(called, type) else called

    @functools.wraps(function)
    def explaining(*values: Any, **named: Any) -> Any:
        try:
            return function(*values, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from inside of the function
            text = str(error)
        shown = own = function.__qualname__
        if own.count(".") == 1:  # a method, which users call by its class's subclass, or by another name
            owner = values[0] if isinstance(values[0], type) else type(values[0])
            shown = f"{owner.__name__.removesuffix('Spec')}.{function.__name__}".removesuffix(".__init__")
        known = _keywords(function)
        if wrong := [word for word in named if word not in known]:
            hint = _meant(wrong[0], known, objects)
            text = f"{own}() got an unexpected keyword argument {wrong[0]!r}{hint}"
        raise TypeError(text.replace(f"{own}()", f"{shown}()"))

    if isinstance(called, type):
        called.__init__ = explaining  # type: ignore[misc]  # as a dataclass gets one
        return called
    return cast(_Called, explaining)


def _meant(word: str, known: Iterable[str], objects: Mapping[str, Callable[..., Any]]) -> str:
    for keyword, kind in objects.items():
        inside = _keywords(kind)
        if found := [one for one in (word, *SYNONYMS.get(word, ())) if one in inside]:
            return f"; did you mean {keyword}={kind.__name__}({found[0]}=…)?"
    return nearest(word, known)


def _keywords(called: Callable[..., Any]) -> list[str]:
    import inspect  # here, because the import takes a few milliseconds

    return [one for one in inspect.signature(called).parameters if one not in {"self", "cls"}]
