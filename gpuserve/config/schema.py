"""What a config file may say, as a whole, and what may stand at a path in it. ``gpuserve schema`` prints the
JSON Schema of these classes, and the names of environment variables follow from the keys. No file, no
environment.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from gpuserve.config.entries.fields import Entry, EntryOf, Key, keys_of, spellings_of
from gpuserve.config.entries.kinds import Kind, ListOf, MappingOf, OrNull
from gpuserve.config.entries.model import ModelEntry
from gpuserve.config.positions import Path
from gpuserve.options import REQUIRED
from gpuserve.settings.server import ServerSettings


class ServerEntry(Entry):
    """The keys of ``server``: what does not depend on a model."""

    keys: ClassVar = keys_of(ServerSettings)
    spellings: ClassVar = spellings_of(ServerSettings)


class ConfigFile(Entry):
    """A whole file: the server, and the models it serves."""

    keys: ClassVar = {
        "server": Key(EntryOf(ServerEntry), "What does not depend on a model.", make=lambda: ServerEntry({})),
        "models": Key(ListOf(EntryOf(ModelEntry), some=True), "The models to serve."),
    }


CONFIG_KEYS: Final = frozenset(ConfigFile.keys)


def kind_at(path: Path) -> Kind | None:
    """What the value at a path must be, besides null; None where the schema has no such path."""
    kind: Kind | None = EntryOf(ConfigFile)
    for step in path:
        kind = None if kind is None else _member(kind, step)
    return kind


def key_at(path: Path) -> Key:
    """The key at the end of a path that the schema has."""
    kind = kind_at(path[:-1])
    assert isinstance(kind, EntryOf)
    return kind.entry.keys[str(path[-1])]


def keys_at(path: Path) -> tuple[str, ...]:
    """The keys that the mapping at a path may have; empty where it is none or takes any key."""
    kind = kind_at(path)
    return tuple(kind.entry.keys) if isinstance(kind, EntryOf) else ()


def usual_key(path: Path) -> str:
    """The last key of a path by its own name, where a file may have Triton's and PyTriton's for it."""
    *parents, key = path
    kind = kind_at(tuple(parents))
    return kind.entry.spellings.get(str(key), str(key)) if isinstance(kind, EntryOf) else str(key)


def _member(kind: Kind, step: str | int) -> Kind | None:
    """What the value at one step inside must be; inside a value of any kind, any."""
    if isinstance(kind, EntryOf):
        key = kind.entry.keys.get(str(step))
        return None if key is None else _bare(key.kind)
    if isinstance(kind, MappingOf):
        return _bare(kind.value)
    if isinstance(kind, ListOf):
        return _bare(kind.parts()[0]) if isinstance(step, int) else None
    return kind if type(kind) is Kind else None


def _bare(kind: Kind) -> Kind:
    return _bare(kind.kind) if isinstance(kind, OrNull) else kind


# ---- JSON Schema --------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    named = {one.__name__: mapping_schema(one) for one in _entries(EntryOf(ConfigFile))}
    whole = named.pop(ConfigFile.__name__)
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "$defs": dict(sorted(named.items())), **whole}


def _entries(kind: Kind) -> Iterator[type[Entry]]:
    """The classes of entries that values of a kind are made of."""
    if isinstance(kind, EntryOf):
        yield kind.entry
        for key in kind.entry.keys.values():
            yield from _entries(key.kind)
    for part in kind.parts():
        yield from _entries(part)


def mapping_schema(entry: type[Entry]) -> dict[str, Any]:
    required = [name for name, key in entry.keys.items() if key.is_required]
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(entry),
        "properties": {name: _property(name, key) for name, key in entry.keys.items()},
        **({"required": required} if required else {}),
        "title": entry.__name__,
        "type": "object",
    }


def _property(name: str, key: Key) -> dict[str, Any]:
    is_entry = isinstance(_bare(key.kind), EntryOf)
    return {
        **(
            {}
            if key.default is REQUIRED or isinstance(key.kind, EntryOf)
            else {"default": copy.copy(key.default)}
        ),
        "description": key.description,
        **({"examples": [*key.examples]} if key.examples else {}),
        **({} if is_entry else {"title": name.replace("_", " ").title()}),
        **key.kind.schema(),
    }
