"""What must hold between several keys of a configuration.

The rules look at plain data that the schema may have found wrong as well, so that a file shows all
its mistakes at once; what has the wrong type is passed over here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gpuserve.config.positions import Path
from gpuserve.settings import ServerSettings


class Violation(NamedTuple):
    """A rule that the value at ``path`` breaks."""

    path: Path
    text: str


_PORT_KEYS = ("http_port", "grpc_port", "metrics_port")


def violations(data: Any) -> Iterator[Violation]:
    """Every broken rule of a whole configuration."""
    yield from _ports(_mapping(_mapping(data).get("server")))
    models = _entries(_mapping(data).get("models"))
    yield from _repeated(models, ("models",), "model")
    for index, model in models:
        path: Path = ("models", index)
        yield from _batching(model, path)
        for key in ("inputs", "outputs"):
            yield from _repeated(_entries(model.get(key)), (*path, key), "tensor", fold=False)


def _ports(server: dict[str, Any]) -> Iterator[Violation]:
    defaults = ServerSettings()
    first_use: dict[int, str] = {}
    for key in sorted(_PORT_KEYS, key=lambda key: key in server):  # blame a given port, not a default
        port = server.get(key, getattr(defaults, key))
        if not _is_int(port) or port == 0:
            continue
        other = first_use.setdefault(port, key)
        if other != key:
            default = "" if other in server else " (its default)"
            yield Violation(
                ("server", key),
                f"port {port} is already that of {other}{default}; give {key} another",
            )


def _repeated(
    entries: list[tuple[int, dict[str, Any]]], path: Path, what: str, *, fold: bool = True
) -> Iterator[Violation]:
    """Names that are given twice. Model names must differ in more than case: some clients fold it."""
    first_use: dict[str, tuple[int, str]] = {}
    for index, entry in entries:
        name = entry.get("name")
        if not isinstance(name, str):
            continue
        first, earlier = first_use.setdefault(name.casefold() if fold else name, (index, name))
        if first != index:
            place = f"{path[-1]}[{first}]"
            same = "" if earlier == name else f" as {earlier!r}: names must differ in more than case"
            yield Violation((*path, index, "name"), f"{what} {name!r} is already declared in {place}{same}")


def _batching(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    batching = _mapping(model.get("batching"))
    limit = model.get("max_batch_size", 0)
    if not _is_int(limit) or limit < 0:
        return
    if limit == 0:
        yield from _batching_without_batches(batching, (*path, "batching"))
        return
    sizes = batching.get("preferred_batch_sizes")
    for index, size in enumerate(sizes if isinstance(sizes, list) else ()):
        if _is_int(size) and size > limit:
            yield Violation(
                (*path, "batching", "preferred_batch_sizes", index),
                f"expected a preferred batch size of at most max_batch_size, which is {limit}, given {size}",
            )


def _batching_without_batches(batching: dict[str, Any], path: Path) -> Iterator[Violation]:
    for key in ("preferred_batch_sizes", "max_queue_delay_us"):
        if batching.get(key):
            yield Violation(
                (*path, key),
                f"{key} has no effect without a max_batch_size of at least 1; the model does not batch",
            )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> list[tuple[int, dict[str, Any]]]:
    """The mappings of a list, with their positions."""
    entries = value if isinstance(value, list) else []
    return [(index, entry) for index, entry in enumerate(entries) if isinstance(entry, dict)]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
