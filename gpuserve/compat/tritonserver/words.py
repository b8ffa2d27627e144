"""The small languages in the values of options: ``local,size=1048576``, ``health:key=value``. Pure."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_LOCAL_CACHE: Final = "local"
_SUMMARIES: Final = "summary_latencies"
_SWITCHES: Final = {"true": True, "false": False}


class Setting(NamedTuple):
    """A setting of ours: the path of its key below ``server``, its value, and the option that says it."""

    path: tuple[str, ...]
    value: Any
    option: str


class OptionProblem(Exception):
    """What is wrong with an option; the text stands behind its name."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(text)
        self.option = option
        self.text = text


def wrong(option: str, expected: str, given: str) -> OptionProblem:
    return OptionProblem(option, f"expected {expected}, given {given!r}")


def cache_nbytes(option: str, text: str) -> int:
    """The size of the response cache in bytes, as in ``local,size=1048576``."""
    kind, _, setting = text.partition(",")
    if kind.strip() != _LOCAL_CACHE:
        raise OptionProblem(
            option,
            f"{text!r} is not supported by gpuserve: answers are kept in the server's own memory; use "
            "'local,size=<bytes>'",
        )
    name, _, size = setting.partition("=")
    if name.strip() != "size" or not size.strip().isdecimal():
        raise wrong(option, "'local,size=<bytes>'", text)
    return int(size)


def access_rule(option: str, text: str) -> dict[str, Any]:
    """An access rule, of ``health,metadata:key=value``, with the keys of ``settings.access.AccessRule``."""
    groups, colon, pair = text.partition(":")
    header, _, token = pair.partition("=")
    if not (groups and colon and header and token):
        raise wrong(option, "'<group>,<group>:<header>=<value>'", text)
    return {"groups": [one.strip() for one in groups.split(",")], "token": token, "header": header}


def is_summaries(option: str, text: str) -> bool | None:
    """Whether quantiles of latencies are wanted; None: it is about something else."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise wrong(option, "'<setting>=<value>'", text)
    if name != _SUMMARIES:
        return None
    if value.lower() not in _SWITCHES:
        raise wrong(option, f"'{_SUMMARIES}=true' or '{_SUMMARIES}=false'", text)
    return _SWITCHES[value.lower()]
