"""What a reload of the config has done and what not: for whoever asked, and a line of the log for each."""

from __future__ import annotations

import logging
from typing import Any, Final

from gpuserve.errors import Code
from gpuserve.live_settings import Refusal, key_of
from gpuserve.supervisor.operator.outcome import Outcome, Tell
from gpuserve.supervisor.reload.changes import Action

logger = logging.getLogger(__name__)

_SETTINGS: Final = "settings"
_REFUSED: Final = "refused"
_FAILED: Final = "failed"
_KEYS: Final = (*(one.value for one in Action), _SETTINGS, _REFUSED, _FAILED)
_SENTENCES: Final = {
    Action.LOAD: "model {} is loaded",
    Action.RELOAD: "model {} is loaded anew",
    Action.SCALE: "model {} is scaled",
    Action.UNLOAD: "model {} is unloaded",
}
_LINE: Final = "config reload: %s"
NOTHING: Final = "nothing has changed"


class ConfigReport:
    """The report of one reload. ``tell`` is given each change as soon as it is made; what was not done is in
    the outcome.
    """

    def __init__(self, tell: Tell = lambda _: None) -> None:
        self.result: dict[str, list[Any]] = {key: [] for key in _KEYS}
        self._tell = tell

    def setting(self, name: str, line: str) -> None:
        """A setting has another value."""
        self.result[_SETTINGS].append(key_of(name))
        self._changed(line)

    def refused(self, refusal: Refusal) -> None:
        """A setting stays."""
        self.result[_REFUSED].append({"key": refusal.key, "text": refusal.text})
        logger.warning(_LINE, refusal.text)

    def done(self, action: Action, model: str) -> None:
        """A model is as the file says."""
        self.result[action.value].append(model)
        self._changed(_SENTENCES[action].format(model))

    def failed(self, model: str, text: str) -> None:
        """A model stays as it was."""
        self.result[_FAILED].append({"model": model, "text": text})
        logger.error(_LINE, f"model {model}: {text}")

    def unchanged(self) -> None:
        """There was nothing to do."""
        logger.info(_LINE, NOTHING)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was done, and nothing refused."""
        return not any(self.result.values())

    def outcome(self) -> Outcome:
        """A success where the server is as the file says; else all that is not so."""
        texts = [one["text"] for one in self.result[_REFUSED]]
        texts += [f"model {one['model']}: {one['text']}" for one in self.result[_FAILED]]
        if texts:
            return Outcome(Code.INVALID_ARGUMENT.value, "\n".join(texts), self.result)
        return Outcome("", NOTHING if self.is_empty else "", self.result)

    def _changed(self, line: str) -> None:
        logger.info(_LINE, line)
        self._tell(line)
