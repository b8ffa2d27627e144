"""The server that follows the files of its models: it looks at them in the background, every so often or when
something in their folders has changed, and has what has changed reloaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from typing import Final, NamedTuple, TypeAlias, TypeVar

from gpuserve.config.fingerprints import file_fingerprint, package_folders, sources_fingerprint
from gpuserve.config.settings.server import POLL
from gpuserve.control.operator import AnswerOutcome, VerbOutcome
from gpuserve.errors import GpuserveError
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.core.server_life import ServerState
from gpuserve.supervisor.models.repository import ConfigSource
from gpuserve.supervisor.reload.background import Background
from gpuserve.supervisor.reload.file_watch import FileWatch
from gpuserve.supervisor.reload.followed import FollowedFiles, ImportedFile, SourceFolder
from gpuserve.supervisor.reload.looks import Looks, Stamps

logger = logging.getLogger(__name__)

#: A change is looked at again after this time, or the time between looks where that is less.
SETTLE_S: Final = 1.0
#: The same where changes are told by the kernel: somebody waits for the reload.
WATCHED_SETTLE_S: Final = 0.15
#: From one look to the next where the kernel was to tell of changes and cannot.
UNWATCHED_S: Final = 1.0

#: Reloads the models whose files have changed, and says how that ended.
Begin: TypeAlias = Callable[[Collection[str], AnswerOutcome], None]
_Followed = TypeVar("_Followed", ImportedFile, SourceFolder, ImportedFile | SourceFolder)
#: What there was before a reload where its models might find what they lack.
_Before: TypeAlias = dict[SourceFolder, Hashable]


class _Read(NamedTuple):
    """What a look has read; ``trouble`` says why there is nothing."""

    stamps: Stamps
    folders: Collection[str]
    trouble: str = ""


class FilePolling:
    """The looks of one server; without a ``source`` there is nothing to look at. With a ``watch`` they come
    when something has changed, whatever the settings say.
    """

    def __init__(
        self,
        source: ConfigSource | None,
        core: ServerCore,
        background: Background,
        begin: Begin,
        watch: FileWatch | None = None,
    ) -> None:
        self._source = source
        self._background = background
        self._core = core
        self._begin = begin
        self._watch = watch
        self._looks = Looks({} if source is None else source.start_fingerprints)
        self._followed = FollowedFiles()
        #: Where the files that the source names change, as the last look has found.
        self._folders: Collection[str] = ()
        #: Which of the timers that were set is the one that counts.
        self._timer = 0
        #: What kept the last look from seeing anything, which is told once.
        self._trouble = ""

    def start(self) -> None:
        """Look from now on: the server serves."""
        if self._watch is not None:
            self._watch.open(lambda: self._core.reactor.call_soon_threadsafe(lambda: self._set(0.0)))
            self._set(0.0)
        self.set_timer()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def imported(self, model: str, version: int, generation: int, files: Collection[str]) -> None:
        """Look at what a worker of a model has imported, too."""
        self._followed.imported(model, version, generation, files)
        self._follow()

    def set_timer(self) -> None:
        """Look again when it is time by the settings of now; in place of what was to be looked at before."""
        interval_s = self._interval_s()
        if interval_s > 0:
            self._set(interval_s)

    def _interval_s(self) -> float:
        """Return how long it is from one look to the next, 0 where time is no reason for one."""
        now = self._core.settings.now
        if self._watch is not None:
            return UNWATCHED_S if self._watch.has_failed else 0.0
        return now.repository_poll_s if now.model_control == POLL else 0.0

    def _set(self, delay_s: float) -> None:
        self._timer += 1
        if self._source is not None:
            self._core.reactor.call_later(delay_s, partial(self._look, self._timer))

    # ---- one look -------------------------------------------------------------------------

    def _look(self, timer: int) -> None:
        is_wanted = self._watch is not None or self._interval_s() > 0
        if timer == self._timer and is_wanted and self._core.life.state is ServerState.SERVING:
            self._background.run(partial(self._read, self._followed.all()), partial(self._seen, timer))

    def _read(self, followed: Collection[ImportedFile | SourceFolder]) -> _Read:
        """What the files are now, or what keeps them from being looked at."""
        assert self._source is not None
        try:
            return _Read({**self._source.fingerprints(), **_stamps(followed)}, self._source.folders())
        except OSError as error:
            return _Read({}, (), str(error))

    def _seen(self, timer: int, read: _Read | GpuserveError) -> None:
        stamps, folders, trouble = read if isinstance(read, _Read) else _Read({}, (), str(read))
        if timer != self._timer or self._core.life.state is not ServerState.SERVING:
            return
        if trouble and trouble != self._trouble:
            logger.error("the files of the models cannot be looked at, and nothing is changed: %s", trouble)
        self._trouble = trouble
        self.set_timer()
        if trouble:
            return
        self._folders = folders
        self._watch_folders()
        look = self._looks.look(self._as_followed(stamps))
        if look.is_moving:
            self._set(WATCHED_SETTLE_S if self._watch else min(SETTLE_S, self._interval_s()))
        if look.changed:
            self._reload(look.changed)

    def _as_followed(self, stamps: Stamps) -> Stamps:
        """Return what a look has read, less what is not followed any more, and with what came meanwhile."""
        keys = self._followed.all()
        kept = {key: one for key, one in stamps.items() if not _is_followed(key) or key in keys}
        return {**kept, **_stamps(key for key in keys if key not in stamps)}

    # ---- what has changed -----------------------------------------------------------------

    def _reload(self, changed: Collection[Hashable]) -> None:
        for path in sorted({one.path for one in changed if isinstance(one, ImportedFile)}):
            logger.info("changed: %s", os.path.relpath(path))
        models = {one.model if isinstance(one, ImportedFile | SourceFolder) else str(one) for one in changed}
        before = _stamps(self._followed.sources(models, self._folders))
        self._begin(models, partial(self._ended, models, before))  # "" stands for the config itself

    def _ended(self, models: Collection[str], before: _Before, outcome: VerbOutcome) -> None:
        """Note of which models the files are as they are served. What others lack is looked for where they
        looked, and may have come meanwhile.
        """
        failed = {one["model"] for one in outcome.result.get("failed", ())}
        if outcome.code and not any(outcome.result.values()):  # nothing could be read
            failed = {one for one in models if one}
        looked_at = {
            one._replace(model=model): stamp
            for model in failed
            for one, stamp in before.items()
            if one.model == (model if model in models else "")  # those of a new config were not known by name
        }
        self._followed.loaded(set(models) - failed)
        self._followed.failed(failed, looked_at)
        self._looks.follow(looked_at)
        self._follow()
        if not all(models):
            self._background.run(partial(self._read, ()), self._declared)
        if failed and self._watch is not None:
            self._set(0.0)

    def _declared(self, read: _Read | GpuserveError) -> None:
        """Note which models the config has now, for a change of which it was read: they were dealt with."""
        if isinstance(read, _Read) and not read.trouble:
            self._looks.follow(read.stamps)
            self._looks.keep(lambda key: _is_followed(key) or key in read.stamps)

    def _follow(self) -> None:
        """Look at what is followed by now, and no longer at what is not; it has not changed by that."""
        keys = self._followed.all()
        self._looks.keep(lambda key: not _is_followed(key) or key in keys)
        self._looks.follow(_stamps(key for key in keys if key not in self._looks))
        self._watch_folders()

    def _watch_folders(self) -> None:
        if self._watch is None or self._core.life.state is not ServerState.SERVING:
            return
        folders = self._followed.folders().union(self._folders)
        of_broken = {one.path for one in self._followed.all() if isinstance(one, SourceFolder)}
        self._watch.watch(folders.union(*map(package_folders, of_broken)))


def _is_followed(key: Hashable) -> bool:
    """Whether this is looked at because of what a model imports, and not because it is declared."""
    return isinstance(key, ImportedFile | SourceFolder)


def _stamps(keys: Iterable[_Followed]) -> dict[_Followed, Hashable]:
    return {
        one: sources_fingerprint(one.path, one.without)
        if isinstance(one, SourceFolder)
        else file_fingerprint(one.path)
        for one in keys
    }
