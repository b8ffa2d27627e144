"""The conversion of options of Triton's server, already parsed, to our settings and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.compat.tritonserver.flags import FlagFate, TritonFlag
from gpuserve.config.settings.server import EXPLICIT, TraceSettings

_ROLES: Final = ("http", "grpc", "metrics")
_WILDCARD: Final = "*"
#: The group of endpoints that load and unload models.
_REPOSITORY: Final = "model-repository"


class TritonOptions:
    """Given options of Triton's server with their values. ``spell`` returns an option as the user wrote it:
    as a flag, or as an attribute of ``TritonConfig``.
    """

    def __init__(self, given: Iterable[tuple[TritonFlag, Any]], spell: Callable[[str], str]) -> None:
        present = [(flag, value) for flag, value in given if value is not None]
        self._values = {flag.name: value for flag, value in present}
        self._flags = [flag for flag, _ in present]
        self.spell = spell

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def of(self, fate: FlagFate) -> list[tuple[TritonFlag, Any]]:
        return [(flag, self._values[flag.name]) for flag in self._flags if flag.fate is fate]

    def spelled(self, names: Sequence[str], last: str = "and") -> str:
        spelled = [self.spell(name) for name in names]
        return f" {last} ".join([", ".join(spelled[:-1]), spelled[-1]] if len(spelled) > 1 else spelled)


class ConvertedOptions(NamedTuple):
    """Settings, and notes for the user, each with its option."""

    settings: Sequence[OptionSetting]
    notes: Sequence[tuple[str, str]]


def convert_options(options: TritonOptions) -> ConvertedOptions:
    """Convert all options. Raise OptionProblem if an option is refused or invalid."""
    for flag, value in options.of(FlagFate.REFUSED):
        if value:
            raise OptionProblem(flag.name, f"not supported by gpuserve: {flag.text}")
    rules, rule_notes = _access_rules(options)
    settings = [
        OptionSetting(tuple(flag.text.split(".")), value, flag.name)
        for flag, value in options.of(FlagFate.SETTING)
    ]
    convert = (_ports, _tls, _given_values, _loaded_at_start, _cache, _metrics)
    settings += [one for convert_some in convert for one in convert_some(options)]
    settings += [*rules, *trace_settings(options.get)]
    notes = [(flag.name, f"makes no difference: {flag.text}") for flag, _ in options.of(FlagFate.NO_EFFECT)]
    return ConvertedOptions(settings, [*notes, *rule_notes])


def _ports(options: TritonOptions) -> list[OptionSetting]:
    found = []
    for role in _ROLES:
        allow, port = f"allow-{role}", f"{role}-port"
        if options.get(allow) is False:
            found.append(OptionSetting((f"{role}_port",), None, allow))
        elif port in options:
            found.append(OptionSetting((f"{role}_port",), options.get(port), port))
    return found


def _tls(options: TritonOptions) -> list[OptionSetting]:
    """Return TLS settings for the gRPC port alone; Triton's other ports have no TLS."""
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
    paths = [OptionSetting((key,), str(options.get(name)), name) for key, name in files.items()]
    return [OptionSetting(("tls_ports",), ("grpc",), switch), *paths]


def _given_values(options: TritonOptions) -> list[OptionSetting]:
    found, age, ready = [], "grpc-max-connection-age", "strict-readiness"
    if age in options:
        found.append(OptionSetting(("max_connection_age_s",), options.get(age) / 1000, age))
    if ready in options:
        found.append(OptionSetting(("min_ready_instances",), int(options.get(ready)), ready))
    # Any client may load models in mode explicit, as with Triton, and not only clients on this machine.
    if options.get(mode := "model-control-mode") == EXPLICIT:
        found.append(OptionSetting(("remote_control",), [_REPOSITORY], mode))
    return found


def _loaded_at_start(options: TritonOptions) -> list[OptionSetting]:
    """Return, in mode explicit, the named models, no models without names, and all models for ``*``."""
    name, names = "load-model", options.get("load-model")
    is_explicit = options.get("model-control-mode") == EXPLICIT
    if names and not is_explicit:
        raise OptionProblem(name, f"needs {options.spell('model-control-mode')}=explicit")
    if not is_explicit or names == [_WILDCARD]:
        return []
    if names and _WILDCARD in names:
        raise OptionProblem(name, "* stands for every model, and must be the only one")
    return [OptionSetting(("load_at_start",), list(dict.fromkeys(names or ())), name)]


def _cache(options: TritonOptions) -> list[OptionSetting]:
    old, new = "response-cache-byte-size", "cache-config"
    if options.get(old) is not None and options.get(new):
        raise OptionProblem(old, f"does not go with {options.spell(new)}: give one of them")
    if old in options:
        return [OptionSetting(("response_cache_nbytes",), options.get(old), old)]
    nbytes = 0
    for text in options.get(new, ()):
        kind, _, setting = text.partition(",")
        name, _, size = setting.partition("=")
        if kind.strip() != _LOCAL_CACHE:
            cached = f"{text!r} is not supported by gpuserve: responses are cached in the server's own memory"
            raise OptionProblem(new, f"{cached}; use 'local,size=<bytes>'")
        if name.strip() != "size" or not size.strip().isdecimal():
            raise _invalid_value(new, "'local,size=<bytes>'", text)
        nbytes += int(size)
    return [OptionSetting(("response_cache_nbytes",), nbytes, new)] if options.get(new) else []


def _metrics(options: TritonOptions) -> list[OptionSetting]:
    """Return whether quantiles of latencies are enabled; other settings make no difference."""
    option, found = "metrics-config", []
    for text in options.get(option, ()):
        name, _, value = text.partition("=")
        if not (name and value):
            raise _invalid_value(option, "'<setting>=<value>'", text)
        if name == _SUMMARIES and value.lower() not in _SWITCHES:
            raise _invalid_value(option, f"'{_SUMMARIES}=true' or '{_SUMMARIES}=false'", text)
        if name == _SUMMARIES:
            found = [OptionSetting(("metrics_summaries",), _SWITCHES[value.lower()], option)]
    return found


def _access_rules(options: TritonOptions) -> tuple[list[OptionSetting], list[tuple[str, str]]]:
    """Return the access rules of both protocols, with a note if a rule was given for one protocol only."""
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
    flag = next(flags[one] for one in flags if rules[one])
    return [OptionSetting(("access_rules",), together, flag)], notes


_OPTION: Final = "trace-config"
_NUMBERS: Final = {"rate": "rate", "count": "count", "triton,log-frequency": "log_frequency"}
_TEXTS: Final = {"mode": "mode", "triton,file": "file", "opentelemetry,url": "url"}
_LEVEL: Final = "level"
_RESOURCE: Final = "opentelemetry,resource"
_KNOWN: Final = (_LEVEL, *_NUMBERS, *_TEXTS, _RESOURCE)
_OFF: Final = "OFF"
#: Names of levels. Others are reported by the check of all settings.
_LEVELS: Final = dict.fromkeys(("TRUE", "ON", "MIN", "MAX"), "TIMESTAMPS") | {"FALSE": _OFF}
#: The older flags. ``trace-config`` overrides them.
_OLDER: Final = {
    "trace-file": "file", "trace-rate": "rate", "trace-count": "count",
    "trace-log-frequency": "log_frequency",
}  # fmt: skip


def trace_settings(get: Callable[[str], Any]) -> list[OptionSetting]:
    """Return the trace settings of the options, which ``get`` returns by name. ``trace-config`` has items
    such as ``level=TIMESTAMPS``, ``mode=opentelemetry``, ``triton,file=t.json`` and
    ``opentelemetry,resource=service.name=name``. The last item of a name counts, but levels and resources add
    up. Raise OptionProblem if an item is unknown.
    """
    items: Sequence[str] = get(_OPTION) or ()
    fields: dict[str, Any] = {}
    for item in items:
        name, _, value = item.partition("=")
        _add_trace_item(fields, name.strip().lower(), value.strip(), item)
    found = {key: OptionSetting(("trace", key), value, _OPTION) for key, value in fields.items()}
    for option, key in _OLDER.items():
        if get(option) is not None:
            found.setdefault(key, OptionSetting(("trace", key), get(option), option))
    levels = [*(_trace_level(one) for one in get("trace-level") or ()), *fields.get(_LEVEL, ())]
    if levels:
        option = _OPTION if _LEVEL in fields else "trace-level"
        found[_LEVEL] = OptionSetting(("trace", _LEVEL), () if _OFF in levels else tuple(levels), option)
    return list(found.values())


def _trace_level(text: str) -> str:
    return _LEVELS.get(text.upper(), text.upper())


def _add_trace_item(fields: dict[str, Any], name: str, value: str, item: str) -> None:
    if name in _NUMBERS:
        try:
            fields[_NUMBERS[name]] = int(value)
        except ValueError:
            raise OptionProblem(_OPTION, f"expected an integer in {item!r}, given {value!r}") from None
    elif name in _TEXTS:
        fields[_TEXTS[name]] = value
    elif name == _LEVEL:
        fields[_LEVEL] = (*fields.get(_LEVEL, ()), _trace_level(value))
    elif name == _RESOURCE:
        key, _, text = value.partition("=")
        fields["resource"] = fields.get("resource", TraceSettings().resource) | {key: text}
    else:
        expected = ", ".join(one + "=" for one in _KNOWN)
        raise OptionProblem(_OPTION, f"{item!r} is not supported by gpuserve: expected one of {expected}")


_LOCAL_CACHE: Final = "local"
_SUMMARIES: Final = "summary_latencies"
_SWITCHES: Final = {"true": True, "false": False}


class OptionSetting(NamedTuple):
    """A setting of ours: the path of its key below ``server``, its value, and the option that sets it."""

    path: tuple[str, ...]
    value: Any
    option: str


class OptionProblem(Exception):
    """A problem with an option. The text follows the option's name."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(text)
        self.option = option
        self.text = text


def _invalid_value(option: str, expected: str, given: str) -> OptionProblem:
    return OptionProblem(option, f"expected {expected}, given {given!r}")


def access_rule(option: str, text: str) -> dict[str, Any]:
    """Return the access rule of ``health,metadata:key=value``, with the keys of ``AccessRule``."""
    groups, colon, pair = text.partition(":")
    header, _, token = pair.partition("=")
    if not (groups and colon and header and token):
        raise _invalid_value(option, "'<group>,<group>:<header>=<value>'", text)
    return {"groups": [one.strip() for one in groups.split(",")], "token": token, "header": header}
