"""Change detection for the files of models: ``FilePolling`` polls the files in the background, at an interval
or when the kernel reports a change in a folder (``FileWatch``), and reloads models whose files have changed.
``FollowedFiles`` knows which files belong to which model, ``ChangeDetector`` when a change is complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from gpuserve.config.fingerprints import file_fingerprint, package_folders, sources_fingerprint
from gpuserve.config.settings.server import POLL
from gpuserve.core.errors import GpuserveError
from gpuserve.supervisor.control.operator_protocol import OnOutcome, VerbOutcome
from gpuserve.supervisor.models.declared_models import ConfigSource
from gpuserve.supervisor.processes.lifecycle import ServerState
from gpuserve.supervisor.processes.server_core import BackgroundThreads, ServerCore

logger = logging.getLogger(__name__)

#: A changed file is polled again after this time, or after the polling interval if that is less.
SETTLE_S: Final = 1.0
#: The same if the kernel reports changes: somebody waits for the reload.
WATCHED_SETTLE_S: Final = 0.15
#: Polling interval if the kernel cannot report changes.
UNWATCHED_S: Final = 1.0
#: Loads of a version whose imports count: the one that serves, and the one that was started last.
_LOADS: Final = 2
#: watchfiles reports changes this long after the last of them, and at the latest so long after the first.
_QUIET_MS: Final = 50
_LATEST_MS: Final = 400
#: A change that happens while a watch is being set up is reported within this time.
_WAKE_MS: Final = 500

#: The polled keys with their fingerprints: the name of a model for all its declared files ("" for the config
#: itself), an ``ImportedFile``, or a ``SourceFolder``.
Fingerprints: TypeAlias = Mapping[Any, Hashable]


class ImportedFile(NamedTuple):
    """A file that workers of a model have imported."""

    model: str
    path: str


class SourceFolder(NamedTuple):
    """A folder in which a file that a broken model lacks may appear. Files of other models are excluded."""

    model: str
    path: str
    excluded: frozenset[str]


_Followed = TypeVar("_Followed", ImportedFile, SourceFolder, ImportedFile | SourceFolder)
#: Fingerprints of the source folders before a reload.
_Before: TypeAlias = dict[SourceFolder, Hashable]


class FollowedFiles:
    """All models' files that no declaration names: imports, and folders of models that failed. Pure."""

    def __init__(self) -> None:
        #: By model and version the imports of its last loads, each by the number of its generation.
        self._imports: dict[tuple[str, int], dict[int, set[str]]] = {}
        self._broken: dict[str, frozenset[SourceFolder]] = {}

    def add_imports(self, model: str, version: int, generation: int, files: Iterable[str]) -> None:
        """Add the files that a worker of a generation has imported."""
        loads = self._imports.setdefault((model, version), {})
        loads.setdefault(generation, set()).update(files)
        for old in sorted(loads)[:-_LOADS]:
            del loads[old]

    def files(self, model: str) -> set[str]:
        loads = [by_generation for (name, _), by_generation in self._imports.items() if name == model]
        return {path for by_generation in loads for paths in by_generation.values() for path in paths}

    def mark_loaded(self, models: Collection[str]) -> None:
        for model in models:
            self._broken.pop(model, None)

    def mark_failed(self, models: Collection[str], sources: Iterable[SourceFolder]) -> None:
        """Note that these models failed to load, and in which folders they looked for files."""
        for model in models:
            self._broken[model] = frozenset(folder for folder in sources if folder.model == model)

    def sources(self, models: Iterable[str], folders: Iterable[str]) -> set[SourceFolder]:
        """Return the folders in which these models may find missing files: ``folders``, and those of their
        imports. A model whose name is not known yet is "".
        """
        found: set[SourceFolder] = set()
        for model in models:
            others = {name for name, _ in self._imports} - {model}
            excluded = frozenset().union(*map(self.files, others)) - self.files(model)
            paths = {*folders, *map(os.path.dirname, self.files(model))}
            found.update(SourceFolder(model, path, excluded) for path in paths)
        return found

    def all(self) -> set[ImportedFile | SourceFolder]:
        """Return all files and folders to be polled."""
        files = {ImportedFile(name, path) for name, _ in self._imports for path in self.files(name)}
        return files.union(*self._broken.values())

    def folders(self) -> set[str]:
        """Return the folders in which changes of ``all()`` can be seen."""
        return {
            os.path.dirname(one.path) if isinstance(one, ImportedFile) else one.path for one in self.all()
        }


class DetectedChanges(NamedTuple):
    """The keys whose change is complete, and whether another key is still being written."""

    changed: frozenset[Hashable]
    is_unsettled: bool


class ChangeDetector:
    """Detects changes by fingerprints that two polls in a row return, so no half-written file loads. Pure."""

    def __init__(self, first: Fingerprints) -> None:
        self._applied = dict(first)
        self._last = dict(first)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._applied or key in self._last

    def add(self, more: Fingerprints) -> None:
        """Follow these keys as well from now on; their present fingerprints are no change."""
        for key, fingerprint in more.items():
            self._applied.setdefault(key, fingerprint)
            self._last.setdefault(key, fingerprint)

    def retain(self, is_followed: Callable[[Hashable], bool]) -> None:
        """Drop the keys that are not followed any more."""
        self._applied = {key: value for key, value in self._applied.items() if is_followed(key)}
        self._last = {key: value for key, value in self._last.items() if is_followed(key)}

    def poll(self, now: Fingerprints) -> DetectedChanges:
        """Compare the present fingerprints with those before."""
        keys = {*now, *self._last, *self._applied}
        unsettled = {key for key in keys if now.get(key) != self._last.get(key)}
        changed = {key for key in keys - unsettled if now.get(key) != self._applied.get(key)}
        self._last = dict(now)
        for key in changed:
            if key in now:
                self._applied[key] = now[key]
            else:
                self._applied.pop(key, None)
        return DetectedChanges(frozenset(changed), bool(unsettled))


class FileWatch:
    """A thread that waits for changes in folders, by watchfiles; ends at ``close()``. Polling compares."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] = lambda: None
        #: Each with its inode: a folder that was deleted and created again is another one.
        self._folders: frozenset[tuple[str, int]] = frozenset()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        #: True if the kernel cannot watch the folders, so that the files have to be polled at an interval.
        self.has_failed = False

    def open(self, wake: Callable[[], object]) -> None:
        """Call ``wake``, in a thread, after each change in a folder."""
        self._wake = wake

    def watch(self, folders: Collection[str]) -> None:
        """Watch these folders, without their subfolders, in place of the earlier ones."""
        existing = set()
        for path in folders:
            with contextlib.suppress(OSError):
                found = os.stat(path)
                if stat.S_ISDIR(found.st_mode):
                    existing.add((os.path.realpath(path), found.st_ino))
        wanted = frozenset(existing)
        if wanted == self._folders:
            return
        self._stop.set()  # the earlier thread ends by itself
        self._folders, self._stop = wanted, threading.Event()
        arguments = (sorted(path for path, _ in wanted), self._stop)
        thread = threading.Thread(target=self._run, args=arguments, name="gpuserve-watch", daemon=True)
        self._threads = [*(earlier for earlier in self._threads if earlier.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._folders = frozenset()

    def _run(self, folders: list[str], stop: threading.Event) -> None:
        from watchfiles import watch  # not at the top: only servers that watch files need it

        changes = watch(
            *folders,
            watch_filter=None,
            recursive=False,
            debounce=_LATEST_MS,
            step=_QUIET_MS,
            rust_timeout=_WAKE_MS,
            yield_on_timeout=True,
            stop_event=stop,
            raise_interrupt=False,
        )
        is_first = True
        try:
            for change in changes:
                if change or is_first:  # the first poll finds changes from before the folders were watched
                    self._wake()
                is_first = False
        except (OSError, RuntimeError) as error:  # watchfiles raises RuntimeErrors of its own
            self.has_failed = True
            logger.warning("folders cannot be watched, and are polled every second instead: %s", error)
            self._wake()


#: Reloads the models whose files have changed, and reports the outcome.
StartReload: TypeAlias = Callable[[Collection[str], OnOutcome], None]


class _Poll(NamedTuple):
    """The result of reading all files; ``trouble`` is the reason if they could not be read."""

    fingerprints: Fingerprints
    folders: Collection[str]
    trouble: str = ""


@dataclass(eq=False)
class FilePolling:
    """The polling of one server's files; without a ``source`` there is nothing to poll. With a ``watch`` the
    files are polled when the kernel reports a change, whatever the settings say.
    """

    _source: ConfigSource | None
    _core: ServerCore
    _background: BackgroundThreads
    _start_reload: StartReload
    _watch: FileWatch | None = None
    #: Folders with the files that the source names, as of the last poll.
    _folders: Collection[str] = ()
    #: The number of the latest timer; earlier timers are void.
    _timer: int = 0
    #: Why the last poll failed; the same reason is logged once.
    _trouble: str = ""

    def __post_init__(self) -> None:
        self._detector = ChangeDetector({} if self._source is None else self._source.start_fingerprints)
        self._followed = FollowedFiles()

    def start(self) -> None:
        """Poll from now on. Called when the server serves."""
        if self._watch is not None:
            self._watch.open(lambda: self._core.reactor.call_soon_threadsafe(lambda: self._schedule(0.0)))
            self._schedule(0.0)
        self.set_timer()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def add_imports(self, model: str, version: int, generation: int, files: Collection[str]) -> None:
        self._followed.add_imports(model, version, generation, files)
        self._update_followed()

    def set_timer(self) -> None:
        """Schedule the next poll by the present settings, in place of the scheduled one."""
        interval_s = self._interval_s()
        if interval_s > 0:
            self._schedule(interval_s)

    def _interval_s(self) -> float:
        settings = self._core.settings.current
        if self._watch is not None:
            return UNWATCHED_S if self._watch.has_failed else 0.0
        return settings.repository_poll_s if settings.model_control == POLL else 0.0

    def _schedule(self, delay_s: float) -> None:
        self._timer += 1
        if self._source is not None:
            self._core.reactor.call_later(delay_s, partial(self._poll, self._timer))

    # ---- one poll -------------------------------------------------------------------------

    def _poll(self, timer: int) -> None:
        is_wanted = self._watch is not None or self._interval_s() > 0
        if timer == self._timer and is_wanted and self._core.lifecycle.state is ServerState.SERVING:
            self._background.run(partial(self._read, self._followed.all()), partial(self._on_polled, timer))

    def _read(self, followed: Collection[ImportedFile | SourceFolder]) -> _Poll:
        """Return the fingerprints of all files. Runs in a background thread."""
        assert self._source is not None
        try:
            return _Poll({**self._source.fingerprints(), **_fingerprints(followed)}, self._source.folders())
        except OSError as error:
            return _Poll({}, (), str(error))

    def _on_polled(self, timer: int, poll: _Poll | GpuserveError) -> None:
        fingerprints, folders, trouble = poll if isinstance(poll, _Poll) else _Poll({}, (), str(poll))
        if timer != self._timer or self._core.lifecycle.state is not ServerState.SERVING:
            return
        if trouble and trouble != self._trouble:
            logger.error("the files of the models cannot be read, and nothing is changed: %s", trouble)
        self._trouble = trouble
        self.set_timer()
        if trouble:
            return
        self._folders = folders
        self._watch_folders()
        # Meanwhile other files may have come to be followed, and others not to be.
        keys = self._followed.all()
        kept = {key: value for key, value in fingerprints.items() if not _is_followed(key) or key in keys}
        kept |= _fingerprints(key for key in keys if key not in fingerprints)
        detected = self._detector.poll(kept)
        if detected.is_unsettled:
            self._schedule(WATCHED_SETTLE_S if self._watch else min(SETTLE_S, self._interval_s()))
        if detected.changed:
            self._reload(detected.changed)

    # ---- the reload -----------------------------------------------------------------------

    def _reload(self, changed: Collection[Hashable]) -> None:
        for path in sorted({key.path for key in changed if isinstance(key, ImportedFile)}):
            logger.info("changed: %s", os.path.relpath(path))
        models = {key.model if isinstance(key, ImportedFile | SourceFolder) else str(key) for key in changed}
        before = _fingerprints(self._followed.sources(models, self._folders))
        # "" stands for the config itself
        self._start_reload(models, partial(self._on_reloaded, models, before))

    def _on_reloaded(self, models: Collection[str], before: _Before, outcome: VerbOutcome) -> None:
        """Follow the failed models' source folders as of before the reload: files may have appeared."""

        def follow_declared(poll: _Poll | GpuserveError) -> None:
            # The reload has dealt with the models that a changed config declares now.
            if isinstance(poll, _Poll) and not poll.trouble:
                self._detector.add(poll.fingerprints)
                self._detector.retain(lambda key: _is_followed(key) or key in poll.fingerprints)

        failed = {entry["model"] for entry in outcome.result.get("failed", ())}
        if outcome.code and not any(outcome.result.values()):  # nothing could be read
            failed = {model for model in models if model}
        sources = {
            folder._replace(model=model): fingerprint
            for model in failed
            for folder, fingerprint in before.items()
            if folder.model == (model if model in models else "")  # names from a new config were not known
        }
        self._followed.mark_loaded(set(models) - failed)
        self._followed.mark_failed(failed, sources)
        self._detector.add(sources)
        self._update_followed()
        if not all(models):
            self._background.run(partial(self._read, ()), follow_declared)

    def _update_followed(self) -> None:
        """Poll exactly the files that are followed by now; a file that is new there has not changed."""
        keys = self._followed.all()
        self._detector.retain(lambda key: not _is_followed(key) or key in keys)
        self._detector.add(_fingerprints(key for key in keys if key not in self._detector))
        self._watch_folders()

    def _watch_folders(self) -> None:
        if self._watch is None or self._core.lifecycle.state is not ServerState.SERVING:
            return
        folders = self._followed.folders().union(self._folders)
        of_broken = {key.path for key in self._followed.all() if isinstance(key, SourceFolder)}
        self._watch.watch(folders.union(*map(package_folders, of_broken)))


def _is_followed(key: Hashable) -> bool:
    """Return whether a key is polled because a model imports the file, not because the model declares it."""
    return isinstance(key, ImportedFile | SourceFolder)


def _fingerprints(keys: Iterable[_Followed]) -> dict[_Followed, Hashable]:
    return {
        key: sources_fingerprint(key.path, key.excluded)
        if isinstance(key, SourceFolder)
        else file_fingerprint(key.path)
        for key in keys
    }
