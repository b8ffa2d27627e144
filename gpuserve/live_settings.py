"""Which settings may change while a server runs, and in what words the others are refused. Pure.

A setting is in the table where all that goes by it can be told of another value: who applies it is the
supervisor (``supervisor/reload/config_reload.py``) and the front (``front/live_settings.py``).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, NamedTuple

from gpuserve.settings import NATIVE, ServerSettings

#: The settings that may change, each with what a new value is for.
LIVE: Final[dict[str, str]] = {
    "drain_timeout_s": "ends and unloads from now on",
    "lame_duck_s": "ends from now on",
    "load_at_start": "models that come into the list, or go out of it, are loaded or unloaded",
    "load_timeout_s": "workers that start from now on",
    "log_level": "the log from now on, over what clients have changed of it",
    "max_connection_age_s": "connections that are made from now on; transport native alone",
    "metrics_summaries": "requests that are answered from now on",
    "min_healthy_devices": "the readiness at once",
    "min_ready_instances": "the readiness at once",
    "model_control": "requests from now on",
    "shared_memory_owners": "regions that are registered from now on",
    "trace": "requests from now on, under what clients have changed of it",
}
#: Those that only the server's own transport can change.
_NATIVE_ALONE: Final = frozenset({"max_connection_age_s"})
#: Nothing of these is shown to anybody.
_SECRET: Final = frozenset({"access_token", "access_rules"})


class Refusal(NamedTuple):
    """A setting that stays as it is."""

    key: str
    text: str


class SettingsChange(NamedTuple):
    """``settings`` are those that hold from now on; ``changed`` names those of them that are new."""

    settings: ServerSettings
    changed: tuple[str, ...]
    refused: tuple[Refusal, ...]


def key_of(name: str) -> str:
    """What users call a setting."""
    return f"server.{name}"


def change(before: ServerSettings, given: ServerSettings) -> SettingsChange:
    """What becomes of the settings of a running server when it is given others."""
    changed: dict[str, Any] = {}
    refused: list[Refusal] = []
    for field in dataclasses.fields(ServerSettings):
        name = field.name
        old, new = getattr(before, name), getattr(given, name)
        if old == new:
            continue
        if name in LIVE and (before.transport == NATIVE or name not in _NATIVE_ALONE):
            changed[name] = new
        else:
            transport = before.transport if name in LIVE else ""
            refused.append(_refusal(name, transport, old, new))
    return SettingsChange(dataclasses.replace(before, **changed), tuple(changed), tuple(refused))


def described(name: str, before: ServerSettings, now: ServerSettings) -> str:
    """A setting that has changed, as a line for the log."""
    if name == "trace":  # too much for a line
        return f"{key_of(name)} is as the file says now"
    return f"{key_of(name)} is {shown(getattr(now, name))} now, it was {shown(getattr(before, name))}"


def shown(value: Any) -> str:
    """A value as a config file has it."""
    return json.dumps(value, default=repr)


def _refusal(name: str, transport: str, stays: Any, given: Any) -> Refusal:
    """``transport``: the one that is to blame, if it is."""
    text = f"{key_of(name)}: cannot change while the server runs"
    if transport:
        text += f" with transport {transport}"
    if name not in _SECRET:
        text += f": {shown(stays)} stays, the file says {shown(given)}"
    return Refusal(key_of(name), text)
