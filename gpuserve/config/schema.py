"""What a config file may say, as a whole, and what may stand at a path in it. ``gpuserve schema`` prints the
JSON Schema of these classes, and the names of environment variables follow from the keys. No file, no
environment.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

from pydantic import Field

from gpuserve.config.entries.fields import Entry, entry_of
from gpuserve.config.entries.model import ModelEntry
from gpuserve.config.positions import Path
from gpuserve.settings.server import ServerSettings

_Settings: Any = entry_of(ServerSettings)


class ServerEntry(_Settings):  # type: ignore[misc]  # its keys come from the table
    """The keys of ``server``: what does not depend on a model."""


class ConfigFile(Entry):
    """A whole file: the server, and the models it serves."""

    server: ServerEntry = Field(default_factory=ServerEntry, description="What does not depend on a model.")
    models: list[ModelEntry] = Field(min_length=1, description="The models to serve.")


def annotation_at(path: Path) -> Any:
    """The type of the value at a path, without null; None where the schema has no such path."""
    annotation: Any = ConfigFile
    for step in path:
        annotation = _member(annotation, step)
    return annotation


def keys_at(path: Path) -> tuple[str, ...]:
    """The keys that the mapping at a path may have; empty where it is none or takes any key."""
    annotation = annotation_at(path)
    return tuple(annotation.model_fields) if _is_entry(annotation) else ()


def usual_key(path: Path) -> str:
    """The last key of a path by its own name, where a file may have Triton's and PyTriton's for it."""
    *parents, key = path
    mapping = annotation_at(tuple(parents))
    return mapping.spellings.get(key, str(key)) if _is_entry(mapping) else str(key)


def json_schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ConfigFile.model_json_schema()}


def _is_entry(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Entry)


def _member(annotation: Any, step: str | int) -> Any:
    origin = typing.get_origin(annotation)
    if origin is dict:
        return _bare(typing.get_args(annotation)[1])
    if annotation is Any:
        return Any
    if origin in {list, tuple} and isinstance(step, int):
        return _bare(typing.get_args(annotation)[0])
    if _is_entry(annotation) and step in annotation.model_fields:
        return _bare(annotation.model_fields[step].annotation)
    return None


def _bare(annotation: Any) -> Any:
    if typing.get_origin(annotation) is Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in {types.UnionType, typing.Union}:
        return _bare(next(one for one in typing.get_args(annotation) if one is not type(None)))
    return annotation
