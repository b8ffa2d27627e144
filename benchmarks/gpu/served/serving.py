"""This server with the models of a section, on free ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.command_line import say
from benchmarks.gpu import MODELS
from benchmarks.gpu.running.section import Site
from benchmarks.servers import ConfiguredGpuServe
from benchmarks.servers.server import RunningServer, running

#: On a fresh machine each worker opens a context of CUDA and reads gigabytes of libraries.
_READY_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the config file has it. ``callable`` is ``file.py:name`` in ``models/``.

    No two requests share a batch unless ``merge``: what is compared are the same batches.
    """

    name: str
    callable: str
    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    device: str = "cuda:0"
    count: int = 1
    max_batch_size: int = 0
    merge: bool = False
    array: str | None = None
    kwargs: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None

    def entry(self) -> dict[str, Any]:
        given = {"array": self.array, "kwargs": self.kwargs}
        return {
            "name": self.name,
            "callable": f"{MODELS}/{self.callable}",
            "instances": [{"device": self.device, "count": self.count}],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "max_batch_size": self.max_batch_size,
            "batching": {"merge": self.merge},
            **{key: value for key, value in given.items() if value is not None},
            **(self.settings or {}),
        }


def tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    """An input or an output, as the config file has it."""
    return {"name": name, "dtype": dtype, "shape": list(shape)}


class _Server(ConfiguredGpuServe):
    def __init__(self, models: Sequence[Model], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder, [one.entry() for one in models])
        self._environment = environment

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self._environment}


@contextmanager
def serving(
    site: Site, label: str, models: Sequence[Model], environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """A server with these models, while the context lasts. ``label`` names its log. Raises ServerFailed: it
    did not come up.
    """
    folder = site.folder / label
    folder.mkdir(parents=True, exist_ok=True)
    server = _Server(models, folder, environment or {})
    server.prepare()
    with running(server, folder, [one.name for one in models], _READY_TIMEOUT_S) as one:
        say(f"{label}: ready after {one.ready_s:.1f} s")
        yield one
