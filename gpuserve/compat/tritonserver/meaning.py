"""What options of Triton's server come to here: settings of ours, and notes on what they do not come to. The
options are those of ``flags.py``, already read, wherever they were given. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.compat.tritonserver.flags import Fate, Flag
from gpuserve.compat.tritonserver.tracing import trace_settings
from gpuserve.compat.tritonserver.words import (
    OptionProblem,
    Setting,
    access_rule,
    cache_nbytes,
    is_summaries,
)
from gpuserve.config.settings.server import EXPLICIT

_ROLES: Final = ("http", "grpc", "metrics")
_WILDCARD: Final = "*"
#: The group of endpoints that load and unload models.
_REPOSITORY: Final = "model-repository"


class Options:
    """Options of Triton's server with the values that they are given, None for those that are not, and how
    they are spelled there: as flags, or as PyTriton has them.
    """

    def __init__(self, given: Iterable[tuple[Flag, Any]], spell: Callable[[str], str]) -> None:
        there = [(flag, value) for flag, value in given if value is not None]
        self._values = {flag.name: value for flag, value in there}
        self._flags = [flag for flag, _ in there]
        self.spell = spell

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def of(self, fate: Fate) -> list[tuple[Flag, Any]]:
        """Those that are given, and have that fate."""
        return [(flag, self._values[flag.name]) for flag in self._flags if flag.fate is fate]

    def spelled(self, names: Sequence[str], last: str = "and") -> str:
        spelled = [self.spell(name) for name in names]
        return f" {last} ".join([", ".join(spelled[:-1]), spelled[-1]] if len(spelled) > 1 else spelled)


class Meaning(NamedTuple):
    """What options come to: settings, and notes, each with the option that says it."""

    settings: Sequence[Setting]
    notes: Sequence[tuple[str, str]]


def meaning_of(options: Options) -> Meaning:
    """What all of them come to. Raises OptionProblem: one is refused, or cannot be as it is."""
    for flag, value in options.of(Fate.REFUSED):
        if value:
            raise OptionProblem(flag.name, f"not supported by gpuserve: {flag.text}")
    alike = [Setting((flag.text,), value, flag.name) for flag, value in options.of(Fate.SETTING)]
    rules, rule_notes = _rules(options)
    settings = [
        *alike,
        *_ports(options),
        *_tls(options),
        *_age(options),
        *_log_level(options),
        *_readiness(options),
        *_loaded_at_start(options),
        *_remote_loads(options),
        *_cache(options),
        *_metrics(options),
        *rules,
        *trace_settings(options.get),
    ]
    notes = [(flag.name, f"makes no difference: {flag.text}") for flag, _ in options.of(Fate.NO_EFFECT)]
    return Meaning(settings, [*notes, *rule_notes])


def _ports(options: Options) -> list[Setting]:
    """Ports that are given, and None for those that are not allowed; the defaults are ours."""
    found = []
    for role in _ROLES:
        allow, port = f"allow-{role}", f"{role}-port"
        if options.get(allow) is False:
            found.append(Setting((f"{role}_port",), None, allow))
        elif port in options:
            found.append(Setting((f"{role}_port",), options.get(port), port))
    return found


def _tls(options: Options) -> list[Setting]:
    """TLS on the gRPC port alone; the other two have none in Triton."""
    mutual = options.get("grpc-use-ssl-mutual")
    if not (options.get("grpc-use-ssl") or mutual):
        return []
    files = {"tls_certfile": "grpc-server-cert", "tls_keyfile": "grpc-server-key"}
    if mutual:
        files["tls_client_ca"] = "grpc-root-cert"
    switch = "grpc-use-ssl-mutual" if mutual else "grpc-use-ssl"
    missing = [name for name in files.values() if name not in options]
    if missing:
        raise OptionProblem(switch, f"needs {options.spelled(missing)}")
    paths = [Setting((key,), str(options.get(name)), name) for key, name in files.items()]
    return [Setting(("tls_ports",), ("grpc",), switch), *paths]


def _age(options: Options) -> list[Setting]:
    name = "grpc-max-connection-age"
    if name not in options:
        return []
    return [Setting(("max_connection_age_s",), options.get(name) / 1000, name)]


def _log_level(options: Options) -> list[Setting]:
    """The least severe level that is on. Those above it are on as well here."""
    if options.get("log-verbose"):
        return [Setting(("log_level",), "debug", "log-verbose")]
    off = [name for name in ("log-info", "log-warning", "log-error") if options.get(name) is False]
    if "log-info" not in off:
        return []
    level = "warning" if "log-warning" not in off else "error"
    return [Setting(("log_level",), level, "log-info")]


def _readiness(options: Options) -> list[Setting]:
    name = "strict-readiness"
    return [Setting(("min_ready_instances",), int(options.get(name)), name)] if name in options else []


def _loaded_at_start(options: Options) -> list[Setting]:
    """With mode explicit: the models that are named, none without any, all with ``*``."""
    name, names = "load-model", options.get("load-model")
    is_explicit = options.get("model-control-mode") == EXPLICIT
    if names and not is_explicit:
        raise OptionProblem(name, f"needs {options.spell('model-control-mode')}=explicit")
    if not is_explicit or names == [_WILDCARD]:
        return []
    if names and _WILDCARD in names:
        raise OptionProblem(name, "* stands for every model, and must be the only one")
    return [Setting(("load_at_start",), list(dict.fromkeys(names or ())), name)]


def _remote_loads(options: Options) -> list[Setting]:
    """With mode explicit any client may load models, as with Triton, and not only those of this machine."""
    name = "model-control-mode"
    return [Setting(("remote_control",), [_REPOSITORY], name)] if options.get(name) == EXPLICIT else []


def _cache(options: Options) -> list[Setting]:
    old, new = "response-cache-byte-size", "cache-config"
    if options.get(old) is not None and options.get(new):
        raise OptionProblem(old, f"does not go with {options.spell(new)}: give one of them")
    if old in options:
        return [Setting(("response_cache_nbytes",), options.get(old), old)]
    sizes = [cache_nbytes(new, one) for one in options.get(new, ())]
    return [Setting(("response_cache_nbytes",), sum(sizes), new)] if sizes else []


def _metrics(options: Options) -> list[Setting]:
    name = "metrics-config"
    found = [is_summaries(name, one) for one in options.get(name, ())]
    return [Setting(("metrics_summaries",), one, name) for one in found[::-1] if one is not None][:1]


def _rules(options: Options) -> tuple[list[Setting], list[tuple[str, str]]]:
    """The access rules, which hold for both protocols here, with a note where only one was to have them."""
    flags = {"http": "http-restricted-api", "grpc": "grpc-restricted-protocol"}
    rules = {role: [access_rule(name, one) for one in options.get(name, ())] for role, name in flags.items()}
    together: list[dict[str, Any]] = []
    for one in [*rules["http"], *rules["grpc"]]:
        if one not in together:
            together.append(one)
    if not together:
        return [], []
    notes = []
    for role, other in (("http", "grpc"), ("grpc", "http")):
        if any(one not in rules[other] for one in rules[role]) and options.get(f"allow-{other}") is not False:
            notes.append((flags[role], f"holds for the {other} port as well: access_rules are for both"))
    return [Setting(("access_rules",), together, next(flags[one] for one in flags if rules[one]))], notes
