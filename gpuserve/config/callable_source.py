"""The callable, or the model file, that a command line names, as a running server reads it again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Hashable, Mapping, Sequence

from gpuserve.config.callable_target import CallableFlags, load_callable
from gpuserve.config.load import Configuration
from gpuserve.config.messages import ConfigProblems
from gpuserve.config.precedence import Override
from gpuserve.config.repository import folders_of, named_files, stamps_of
from gpuserve.declare.spec import ModelSpec


class CallableSource:
    """One model without a config file, asked again for each load and each reload, under the environment and
    the flags of the start. ``start`` is what it was then.
    """

    #: There is no file that an operator could look at.
    path = ""

    def __init__(
        self, target: str, flags: CallableFlags, server: Sequence[Override], environ: Mapping[str, str]
    ) -> None:
        self._target = target
        self._flags = flags
        self._server = server
        self._environ = dict(environ)
        self.start = self._last = self._load()
        self._files = named_files(self.start)
        self.start_stamps = self.stamps()

    def names(self) -> Sequence[str]:
        return [one.name for one in self._last.models]

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The model as it is now; none of another name. Raises ConfigProblems: it cannot be served."""
        return [one for one in self.read_all().models if one.name == model]

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """What the callable says now. Raises ConfigProblems: it cannot be served; where its files have
        ``changed``, that is told as a ``broken`` model.
        """
        try:
            self._last = self._load()
        except ConfigProblems as error:
            if changed is None:
                raise
            return dataclasses.replace(self._last, broken=dict.fromkeys(self.names(), error))
        return self._last

    def stamps(self) -> Mapping[Hashable, Hashable]:
        """What tells that the file of the callable has changed. From any thread."""
        return stamps_of(self._files)

    def folders(self) -> Collection[str]:
        return {os.getcwd(), *folders_of(self._files)}

    def _load(self) -> Configuration:
        return load_callable(self._target, self._flags, self._server, self._environ)
