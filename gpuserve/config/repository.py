"""The config file as the repository that models are loaded from while the server runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuserve.config.load import load_file
from gpuserve.config.precedence import Override
from gpuserve.spec import ModelSpec


class FileRepository:
    """A config file, read again for each load, under the environment and the flags of the start.

    Only its models count then; the settings of the server are those of the start. ``known`` are the names of
    its models when it was read last.
    """

    def __init__(
        self, path: str, environ: Mapping[str, str], flags: Sequence[Override], known: Sequence[str]
    ) -> None:
        self._path = path
        self._environ = dict(environ)
        self._flags = flags
        self._known = tuple(dict.fromkeys(known))

    def names(self) -> Sequence[str]:
        """Every model of the file."""
        return self._known

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The versions of a model as the file has them now.

        Raises:
            ConfigProblems: the file cannot be read, or any of it is wrong.
        """
        models = load_file(self._path, self._environ, self._flags).models
        self._known = tuple(dict.fromkeys(one.name for one in models))
        return [one for one in models if one.name == model]
