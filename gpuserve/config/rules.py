"""What must hold between several keys of a configuration.

The rules look at plain data that the schema may have found wrong as well, so that a file shows all
its mistakes at once; what has the wrong type is passed over here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuserve.access import NO_TOKEN
from gpuserve.config import queue_rules
from gpuserve.config.plain import Violation, entries, is_int, mapping
from gpuserve.config.positions import Path
from gpuserve.settings import ServerSettings

_PORT_KEYS = ("http_port", "grpc_port", "metrics_port")


def violations(data: Any) -> Iterator[Violation]:
    """Every broken rule of a whole configuration."""
    server = mapping(mapping(data).get("server"))
    yield from _ports(server)
    yield from _access(server)
    models = entries(mapping(data).get("models"))
    yield from _repeated(models, ("models",), "model")
    for index, model in models:
        path: Path = ("models", index)
        yield from queue_rules.violations(model, path)
        yield from _answers(model, path)
        for key in ("inputs", "outputs"):
            yield from _repeated(entries(model.get(key)), (*path, key), "tensor", fold=False)


def _ports(server: dict[str, Any]) -> Iterator[Violation]:
    defaults = ServerSettings()
    first_use: dict[int, str] = {}
    for key in sorted(_PORT_KEYS, key=lambda key: key in server):  # blame a given port, not a default
        port = server.get(key, getattr(defaults, key))
        if not is_int(port) or port == 0:
            continue
        other = first_use.setdefault(port, key)
        if other != key:
            default = "" if other in server else " (its default)"
            yield Violation(
                ("server", key),
                f"port {port} is already that of {other}{default}; give {key} another",
            )


def _repeated(
    named: list[tuple[int, dict[str, Any]]], path: Path, what: str, *, fold: bool = True
) -> Iterator[Violation]:
    """Names that are given twice. Model names must differ in more than case: some clients fold it."""
    first_use: dict[str, tuple[int, str]] = {}
    for index, entry in named:
        name = entry.get("name")
        if not isinstance(name, str):
            continue
        first, earlier = first_use.setdefault(name.casefold() if fold else name, (index, name))
        if first != index:
            place = f"{path[-1]}[{first}]"
            same = "" if earlier == name else f" as {earlier!r}: names must differ in more than case"
            yield Violation((*path, index, "name"), f"{what} {name!r} is already declared in {place}{same}")


def _access(server: dict[str, Any]) -> Iterator[Violation]:
    if server.get("restricted_endpoints") and server.get("access_token") is None:
        yield Violation(("server", "restricted_endpoints"), NO_TOKEN)


def _answers(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """What a model that gives any number of responses to a request cannot have."""
    if model.get("decoupled") is not True:
        return
    if model.get("response_cache") is True:
        yield Violation((*path, "response_cache"), "response_cache does not go with decoupled")
    if model.get("retry_on_worker_death") is True:
        yield Violation(
            (*path, "retry_on_worker_death"),
            "retry_on_worker_death does not go with decoupled: some responses may have been sent already",
        )
