"""The reload of the whole config while the server runs: what the file says now is compared with what was
applied last, and what has changed is done: settings first, so that loads go by them, then the models. One
runs at a time; who asks meanwhile is answered by one more, which follows it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from gpuserve.config.settings.checks import compare_settings, describe_change
from gpuserve.config.settings.server import ServerSettings
from gpuserve.control.operator import AnswerOutcome, Tell, VerbOutcome, failed
from gpuserve.errors import Code, GpuserveError, InvalidArgument
from gpuserve.journal.event_journal import EventJournal
from gpuserve.journal.kinds import EventKind
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.core.refusals import refuse_change
from gpuserve.supervisor.core.server_life import ServerLife, ServerState
from gpuserve.supervisor.models.repository import ConfigSource, ServerDeclaration, loaded_at_start
from gpuserve.supervisor.reload.changes import ConfigModels, by_name
from gpuserve.supervisor.reload.reading import Read, RunBeside, SourceReads
from gpuserve.supervisor.reload.run import AppliedModels, ConfigReport, ConfigRun, ConfigWork

logger = logging.getLogger(__name__)

NO_FILE: Final = "this server has no config file that could be read again; its models can be loaded by name"
_NO_MODELS: Final = ConfigModels({}, frozenset())


class _Asked(NamedTuple):
    """Who wants a reload: whom to tell how it ended, and each change. ``is_by_files``: nobody, but files have
    changed.
    """

    answer: AnswerOutcome
    tell: Tell
    is_by_files: bool = False


class ConfigReload:
    """The reloads of one server. ``source`` is None where it has no config file, which is read by
    ``run_beside``. ``adjust`` makes settings hold, given the new ones by name.
    """

    def __init__(
        self,
        source: ConfigSource | None,
        life: ServerLife,
        events: EventJournal,
        work: ConfigWork,
        adjust: Callable[[dict[str, Any]], None],
        run_beside: RunBeside,
    ) -> None:
        self._reads = None if source is None else SourceReads(source, run_beside)
        self._life = life
        self._events = events
        self._work = work
        self._adjust = adjust
        self._settings = ServerSettings() if source is None else source.start.settings
        self._models = AppliedModels(_NO_MODELS if source is None else _models(source.start, self._settings))
        #: One is under way: it is read, or it runs.
        self._is_busy = False
        self._began_at = 0.0
        self._run: ConfigRun | None = None
        #: Those who are answered by the next reload.
        self._asked: list[_Asked] = []
        #: The models that could not be served as they were declared last.
        self._broken: frozenset[str] = frozenset(() if source is None else source.start.broken)
        #: The models whose files have changed since the last one began.
        self._touched: set[str] = set()
        self._is_remembered = False

    @property
    def path(self) -> str:
        return "" if self._reads is None else self._reads.source.path

    # ---- who asks -------------------------------------------------------------------------

    def begin(self, answer: AnswerOutcome, tell: Tell) -> None:
        self._begin_asked(_Asked(answer, tell))

    def _begin_asked(self, asked: _Asked) -> None:
        refusal = InvalidArgument(NO_FILE) if self._reads is None else self._life.why_not_now()
        if refusal is not None:
            asked.answer(failed(refusal))
            return
        self._asked.append(asked)
        if not self._is_busy:
            self._begin_next()
            return
        ran_s = time.monotonic() - self._began_at
        asked.tell(f"a reload has been running for {ran_s:.1f} s; this one begins when that is over")
        if self._run is not None:
            self._read(partial(self._take_back_outdated, self._run))

    def _take_back_outdated(self, run: ConfigRun, now: Read) -> None:
        """Let nothing hold the next reload up that the file does not say any more."""
        if run is self._run and not isinstance(
            now, GpuserveError
        ):  # what is wrong is said when it is its turn
            run.take_back_outdated(_models(now, self._settings))

    def signalled(self) -> None:
        """Reload because of SIGHUP; only the log says how it went. It waits until the server has started."""
        if self._life.state is ServerState.STARTING:
            self._is_remembered = True
        else:
            self.begin(partial(_log_refusal, "SIGHUP"), lambda _: None)

    def touched(self, models: Collection[str], answer: AnswerOutcome) -> None:
        """Reload because files have changed, those of these models. A load of an earlier state of them is
        taken back.
        """
        self._touched.update(models)
        if self._run is not None:
            self._run.take_back(models)
        self._begin_asked(_Asked(answer, lambda _: None, is_by_files=True))

    def anew(self) -> None:
        """Load every model of the config anew, changed or not, because an operator says so."""
        self._touched.update(self._models.snapshot().declared)
        self._begin_asked(_Asked(partial(_log_refusal, "reload"), lambda _: None))

    def started(self) -> None:
        """Reload, now that the server serves, if a signal came while it started."""
        if self._is_remembered:
            self._is_remembered = False
            self.signalled()

    def loaded(self, model: str, specs: Sequence[ModelSpec]) -> None:
        """Note that a model was loaded by its name, as the file declared it then."""
        self._models.loaded(model, specs)

    # ---- one reload -----------------------------------------------------------------------

    def _begin_next(self) -> None:
        self._is_busy, self._began_at = True, time.monotonic()
        asked, self._asked = self._asked, []
        touched, self._touched = self._touched, set()
        changed = touched if all(one.is_by_files for one in asked) else None
        self._read(lambda now: self._was_read(asked, touched, now), changed)

    def _read(self, then: Callable[[Read], None], changed: Collection[str] | None = None) -> None:
        assert self._reads is not None
        self._reads.read(then, changed)

    def _was_read(self, asked: Sequence[_Asked], touched: set[str], now: Read) -> None:
        if (refusal := self._life.why_not_now()) is not None:
            self._end(asked, failed(refusal))
        elif isinstance(now, GpuserveError):
            logger.error("the config is not reloaded, and nothing has changed:\n%s", now)
            self._touched.update(touched)  # they are as before, also for the next reload
            self._end(asked, VerbOutcome(Code.INVALID_ARGUMENT.value, str(now), ConfigReport().result))
        else:
            try:
                self._apply(asked, touched, now)
            except Exception as error:
                self._touched.update(touched)
                self._end(
                    asked, failed(refuse_change("the reload of the config", error), ConfigReport().result)
                )

    def _apply(self, asked: Sequence[_Asked], touched: set[str], now: ServerDeclaration) -> None:
        def tell(line: str) -> None:
            for one in asked:
                one.tell(line)

        def ended() -> None:
            if self._run is run:  # else the reload was refused meanwhile
                self._end(asked, report.outcome())

        report = ConfigReport(tell)
        self._change_settings(now, report)
        self._run = run = ConfigRun(
            self._work,
            self._models,
            self._kept(now, report),
            report,
            self._life.why_not_now,
            ended,
            touched.difference(now.broken),
        )
        run.begin()

    def _kept(self, now: ServerDeclaration, report: ConfigReport) -> ConfigModels:
        """What is to be served: a model that cannot be as it is declared now stays as it was."""
        models, before = _models(now, self._settings), self._models.snapshot()
        for name, reason in now.broken.items():
            report.failed(name, str(reason))
            self._work.undeclared(name, str(reason))
        gone = self._broken.difference(now.broken, models.declared)
        self._broken = frozenset(now.broken)
        self._work.names_changed(sorted(gone))
        kept = {name: before.declared[name] for name in now.broken if name in before.declared}
        return ConfigModels(
            {**models.declared, **kept},
            {*models.wanted, *(one for one in now.broken if one in before.wanted)},
        )

    def _change_settings(self, now: ServerDeclaration, report: ConfigReport) -> None:
        change = compare_settings(self._settings, now.settings)
        before = self._settings
        if change.changed:
            self._adjust({name: getattr(change.settings, name) for name in change.changed})
        self._settings = change.settings
        for name in change.changed:
            report.setting(name, describe_change(name, before, change.settings))
        for refusal in change.refused:
            report.refused(refusal)

    def _end(self, asked: Sequence[_Asked], outcome: VerbOutcome) -> None:
        self._run, self._is_busy = None, False
        changes = {name: what for name, what in outcome.result.items() if what}
        reason = outcome.text if outcome.code else ""
        self._events.tell(EventKind.CONFIG_RELOADED, ok=not reason, reason=reason, changes=changes)
        for one in asked:
            one.answer(outcome)
        if self._asked and not self._is_busy:
            self._begin_next()


def _models(declaration: ServerDeclaration, settings: ServerSettings) -> ConfigModels:
    loaded = loaded_at_start(declaration.models, settings.load_at_start)
    return ConfigModels(by_name(declaration.models), frozenset(one.name for one in loaded))


def _log_refusal(what: str, outcome: VerbOutcome) -> None:
    """Log a refusal; all else that an outcome says was logged when it came about."""
    if not outcome.result:
        logger.warning("%s: %s", what, outcome.text)
