"""From ``TritonConfig`` and ``TritonSecurityConfig`` to ``ServerSettings``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.compat.pytriton.security import TritonSecurityConfig
from gpuserve.compat.pytriton.triton_config import OptionMeaning, TritonConfig, meaning_of
from gpuserve.errors import ConfigError
from gpuserve.settings.checks import check_trace
from gpuserve.settings.server import ServerSettings, TraceSettings

_ROLES: Final = ("http", "grpc", "metrics")
_LOCAL_CACHE: Final = "local"
#: The items of ``trace_config``, which are those of Triton's ``--trace-config``: ``level=TIMESTAMPS``,
#: ``mode=opentelemetry``, ``triton,file=trace.json``, ``opentelemetry,resource=service.name=name`` and so on.
_NUMBERS: Final = {"rate": "rate", "count": "count", "triton,log-frequency": "log_frequency"}
_TEXTS: Final = {"mode": "mode", "triton,file": "file", "opentelemetry,url": "url"}
_LEVEL: Final = "level"
_RESOURCE: Final = "opentelemetry,resource"
_KNOWN: Final = (_LEVEL, *_NUMBERS, *_TEXTS, _RESOURCE)
_OFF: Final = "OFF"


def server_settings(config: TritonConfig, security: TritonSecurityConfig) -> ServerSettings:
    """The settings that the options mean. Raises PyTritonValidationError: an option is refused; the text says
    what to use instead.
    """
    for name, value in _given(config, OptionMeaning.REFUSED):
        if value:
            raise PyTritonValidationError(
                f"TritonConfig.{name} is not supported by gpuserve: {meaning_of(name).text}"
            )
    named_alike = {meaning_of(name).text: value for name, value in _given(config, OptionMeaning.SETTING)}
    cache_nbytes = sum(_cache_nbytes(one) for one in config.cache_config or ())
    return ServerSettings(
        **named_alike,
        **_ports(config),
        **_host(config),
        **_tls(config),
        log_level="debug" if config.log_verbose else "info",
        response_cache_nbytes=cache_nbytes,
        trace=trace_settings(config.trace_config or ()),
        restricted_endpoints=tuple(security.restricted_endpoints or ()),
        access_token=security.access_token,
    )


def without_effect(config: TritonConfig) -> list[str]:
    """The options that are given and do nothing here."""
    return [name for name, _ in _given(config, OptionMeaning.NO_EFFECT)]


def _given(config: TritonConfig, fate: OptionMeaning) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in config.to_dict().items()
        if value is not None and meaning_of(name).fate is fate
    ]


def _ports(config: TritonConfig) -> dict[str, Any]:
    """Ports that are given, and None for those that are not allowed; the defaults are ours."""
    ports = {f"{role}_port": getattr(config, f"{role}_port") for role in _ROLES}
    given = {key: port for key, port in ports.items() if port is not None}
    return given | {f"{role}_port": None for role in _ROLES if getattr(config, f"allow_{role}") is False}


def _host(config: TritonConfig) -> dict[str, Any]:
    """One address for every port: the one that is given for any."""
    given = {getattr(config, f"{role}_address") for role in _ROLES} - {None, ""}
    if len(given) > 1:
        raise PyTritonValidationError(
            "TritonConfig.http_address, grpc_address and metrics_address must be the same: gpuserve listens "
            f"on one address, given {' and '.join(sorted(given))}"
        )
    return {"host": given.pop()} if given else {}


def _tls(config: TritonConfig) -> dict[str, Any]:
    """TLS on the gRPC port alone; the other two have none in Triton."""
    if not (config.grpc_use_ssl or config.grpc_use_ssl_mutual):
        return {}
    files = {"tls_certfile": "grpc_server_cert", "tls_keyfile": "grpc_server_key"}
    if config.grpc_use_ssl_mutual:
        files["tls_client_ca"] = "grpc_root_cert"
    missing = [name for name in files.values() if getattr(config, name) is None]
    if missing:
        raise PyTritonValidationError(
            f"TritonConfig.grpc_use_ssl and grpc_use_ssl_mutual need {' and '.join(missing)}"
        )
    return {"tls_ports": ("grpc",), **{key: str(getattr(config, name)) for key, name in files.items()}}


def _cache_nbytes(text: str) -> int:
    """The size of the response cache in bytes, as in ``local,size=1048576``."""
    kind, _, option = text.partition(",")
    if kind.strip() != _LOCAL_CACHE:
        raise PyTritonValidationError(
            f"TritonConfig.cache_config {text!r} is not supported by gpuserve: answers are kept in the "
            "server's own memory; use 'local,size=<bytes>'"
        )
    name, _, size = option.partition("=")
    if name.strip() != "size" or not size.strip().isdecimal():
        raise PyTritonValidationError(
            f"TritonConfig.cache_config: expected 'local,size=<bytes>', given {text!r}"
        )
    return int(size)


def trace_settings(items: Sequence[str]) -> TraceSettings:
    """The settings that the items mean; what is given twice counts the last time, levels and resource add up.
    Raises PyTritonValidationError: an item is none of these, or the settings cannot be.
    """
    fields: dict[str, Any] = {}
    for item in items:
        name, _, value = item.partition("=")
        _put(fields, name.strip().lower(), value.strip(), item)
    if _OFF in fields.get("level", ()):
        fields["level"] = ()
    settings = TraceSettings(**fields)
    try:
        check_trace(settings)
    except ConfigError as error:
        raise PyTritonValidationError(f"TritonConfig.trace_config: {error}") from None
    return settings


def _put(fields: dict[str, Any], name: str, value: str, item: str) -> None:
    if name in _NUMBERS:
        fields[_NUMBERS[name]] = _number(value, item)
    elif name in _TEXTS:
        fields[_TEXTS[name]] = value
    elif name == _LEVEL:
        fields["level"] = (*fields.get("level", ()), value.upper())
    elif name == _RESOURCE:
        key, _, text = value.partition("=")
        fields["resource"] = fields.get("resource", TraceSettings().resource) | {key: text}
    else:
        raise PyTritonValidationError(
            f"TritonConfig.trace_config {item!r} is not supported by gpuserve: expected one of "
            f"{', '.join(one + '=' for one in _KNOWN)}"
        )


def _number(value: str, item: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PyTritonValidationError(
            f"TritonConfig.trace_config: expected an integer in {item!r}, given {value!r}"
        ) from None
