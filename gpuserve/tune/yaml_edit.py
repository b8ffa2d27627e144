"""Values changed in the text of a config file; comments and order stay. Pure: text in, text out."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML

from gpuserve.config.schema import canonical_key
from gpuserve.config.yaml_document import Path

_FIRST_ITEM = re.compile(r"^models:[^\n]*\n(?:[ ]*(?:#[^\n]*)?\n)*([ ]*)- ", re.MULTILINE)
_WIDE = 10_000


def with_values(text: str, values: Mapping[Path, Any]) -> str:
    """The text with these values at these paths; missing parents are made."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDE
    first = _FIRST_ITEM.search(text)
    offset = len(first[1]) if first else 0
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    for path, value in values.items():
        _put(document, path, value)
    buffer = io.StringIO()
    yaml.dump(document, buffer)
    return buffer.getvalue()


def _put(whole: Any, path: Path, value: Any) -> None:
    *parents, last = path
    for step, following in zip(parents, path[1:], strict=True):
        whole = _child(whole, step, following)
    if isinstance(whole, list) and last == len(whole):
        whole.append(value)
    elif isinstance(whole, dict):  # a file may have Triton's name for the key
        whole[next((key for key in whole if canonical_key((*parents, key)) == last), last)] = value
    else:
        whole[last] = value


def _child(whole: Any, step: str | int, following: str | int) -> Any:
    """The child at this step, made where it is missing."""
    empty: Any = [] if isinstance(following, int) else {}
    if isinstance(whole, list):
        if step == len(whole):
            whole.append(empty)
    elif whole.get(step) is None or isinstance(whole[step], int):  # a number of instances, in short
        whole[step] = empty
    return whole[step]
