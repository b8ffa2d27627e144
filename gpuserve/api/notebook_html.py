"""Text and HTML for objects in a prompt or a notebook, escaped: a server, its models, and arrays. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # clients import this module without the server
    from gpuserve.model.spec import ModelSpec
    from gpuserve_worker.protocol.tensor import TensorSpec

_MODEL_HEAD: Final = ("model", "version", "instances", "inputs", "outputs", "batches")

#: Prefixes for addresses that do not show their protocol.
_NAMED: Final = {"grpc": "gRPC {}", "health": "health {}"}


def server_text(kind: str, models: Sequence[ModelSpec], addresses: Mapping[str, str]) -> str:
    names = [one.name if one.version == 1 else f"{one.name} {one.version}" for one in models]
    return f"<{kind}: {', '.join(names) or 'no models'}; {where(addresses)}>"


def server_html(kind: str, models: Iterable[ModelSpec], addresses: Mapping[str, str]) -> str:
    rows = []
    for one in models:
        devices = ", ".join(instance.device for instance in one.instances) or "ensemble"
        batches = f"up to {one.max_batch_size}" if one.max_batch_size else "none"
        rows.append((one.name, one.version, devices, _tensors(one.inputs), _tensors(one.outputs), batches))
    return line(kind, where(addresses)) + table(_MODEL_HEAD, rows)


def where(addresses: Mapping[str, str]) -> str:
    """Return the addresses of a running server as part of a sentence, or "not running"."""
    if not addresses:
        return "not running"
    return "running at " + ", ".join(_NAMED.get(role, "{}").format(one) for role, one in addresses.items())


def _tensors(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{one.name}: {one.datatype} {list(one.shape)}" for one in tensors)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table with escaped texts."""
    titles = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(one))}</td>' for one in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def line(name: str, text: str) -> str:
    """Return a name in bold with a text behind it, as escaped HTML."""
    return f"<div><b>{escape(name)}</b> {escape(text)}</div>"


_ARRAY_HEAD: Final = ("name", "dtype", "shape", "begins with")
#: Number of elements that are shown, and the maximum length of each.
_ELEMENTS: Final = 6
_CHARACTERS: Final = 40


def arrays_html(arrays: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> str:
    rows = []
    for name, array in arrays.items():
        shown = [repr(one) for one in array.ravel()[:_ELEMENTS].tolist()]
        cut = [one if len(one) <= _CHARACTERS else f"{one[:_CHARACTERS]}…" for one in shown]
        begins = ", ".join([*cut, "…"] if array.size > _ELEMENTS else cut)
        rows.append((name, str(array.dtype), str(list(array.shape)), begins))
    beside = line("parameters", ", ".join(f"{key}={one!r}" for key, one in (parameters or {}).items()))
    return table(_ARRAY_HEAD, rows) + (beside if parameters else "")
