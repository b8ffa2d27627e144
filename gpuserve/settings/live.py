"""Which settings may change while a server runs, and in what words the others are refused. Pure. A setting is
in the table where all that goes by it can be told of another value: who applies it is the supervisor
(``supervisor/reload/config_reload.py``) and the front (``front/process/front.py``).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, NamedTuple

from gpuserve.settings.server import NATIVE, ServerSettings, live_settings
from gpuserve.settings.urls import without_userinfo

#: Those that only the server's own transport can change.
_NATIVE_ALONE: Final = frozenset(
    {
        "answer_grace_s", "body_grace_s", "head_timeout_s", "idle_timeout_s", "max_connection_age_s",
        "max_connections", "max_connections_per_address", "max_streams", "max_unsent_nbytes",
        "min_answer_rate", "min_body_rate",
    }
)  # fmt: skip
#: Nothing of these is shown to anybody.
_SECRET: Final = frozenset({"access_token", "access_rules"})


class SettingRefusal(NamedTuple):
    """A setting that keeps its value while the server runs, with the reason."""

    key: str
    text: str


class SettingsChange(NamedTuple):
    """``settings`` are those that hold from now on; ``changed`` names those of them that are new."""

    settings: ServerSettings
    changed: tuple[str, ...]
    refused: tuple[SettingRefusal, ...]


def key_of(name: str) -> str:
    """The key of a setting in a config file, such as ``server.http_port``."""
    return f"server.{name}"


def change(before: ServerSettings, given: ServerSettings) -> SettingsChange:
    """What becomes of the settings of a running server when it is given others."""
    live = live_settings()
    changed: dict[str, Any] = {}
    refused: list[SettingRefusal] = []
    for field in dataclasses.fields(ServerSettings):
        name = field.name
        old, new = getattr(before, name), getattr(given, name)
        if old == new:
            continue
        if name in live and (before.transport == NATIVE or name not in _NATIVE_ALONE):
            changed[name] = new
        else:
            text = f"{key_of(name)}: cannot change while the server runs"
            if name in live:  # its transport is to blame
                text += f" with transport {before.transport}"
            if name not in _SECRET:
                text += f": {shown(old)} stays, the file says {shown(new)}"
            refused.append(SettingRefusal(key_of(name), text))
    return SettingsChange(dataclasses.replace(before, **changed), tuple(changed), tuple(refused))


def described(name: str, before: ServerSettings, now: ServerSettings) -> str:
    if name == "trace":  # too much for a line
        return f"{key_of(name)} is as the file says now"
    return f"{key_of(name)} is {shown(getattr(now, name))} now, it was {shown(getattr(before, name))}"


def shown(value: Any) -> str:
    return without_userinfo(json.dumps(value, default=repr))
