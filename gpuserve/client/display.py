"""What a client says of itself where it is printed, or is the last line of a notebook's cell. Pure; an access
token is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuserve.api.notebook_html import line, table
from gpuserve.client.config import ClientModelConfig, TensorSpec
from gpuserve.client.settings import ClientSettings
from gpuserve_worker.protocol.tensor import datatype_of

_HEAD: Final = ("", "name", "datatype", "shape")


def client_text(kind: str, settings: ClientSettings) -> str:
    """Write one line: whose client it is."""
    return f"<{kind} {_of(settings)}>"


def client_html(kind: str, settings: ClientSettings, config: ClientModelConfig | None) -> str:
    """Write the same, with the model's tensors once they are known."""
    told = line(kind, _of(settings))
    return told if config is None else told + table(_HEAD, _rows(config))


def _of(settings: ClientSettings) -> str:
    return f"of {settings.shown} at {settings.url}"


def _rows(config: ClientModelConfig) -> Iterator[tuple[str, ...]]:
    for title, tensors in (("input", config.inputs), ("output", config.outputs)):
        for one in tensors or ():
            yield title, one.name, _datatype(one), str(list(one.shape))


def _datatype(tensor: TensorSpec) -> str:
    return datatype_of(tensor.dtype) + (", optional" if tensor.optional else "")
