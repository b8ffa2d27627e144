"""PyTriton's options: ``TritonConfig``, ``TritonSecurityConfig``, and ``ServerSettings`` for them."""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from gpuserve.client.client_settings import HEADERS, HTTP
from gpuserve.compat.pytriton.exceptions import PyTritonValidationError, pytriton_errors
from gpuserve.compat.tritonserver.flags import BY_NAME, FlagFate, FlagKind, TritonFlag
from gpuserve.compat.tritonserver.option_settings import (
    OptionProblem,
    TritonOptions,
    convert_options,
)
from gpuserve.config.settings.checks import check_trace, checked_settings
from gpuserve.config.settings.server import EXPLICIT, TRITON, LogOptions, ServerSettings, TraceSettings
from gpuserve.config.settings.values import ADMIN, DASHBOARD, ENDPOINT_GROUPS
from gpuserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX: Final = "PYTRITON_TRITON_CONFIG_"
_INDEXED: Final = re.compile(r"(.+)_(\d+)")
_BOOLEANS: Final = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off", ""), False
)

_TEXT, _INEFFECTIVE = FlagKind.TEXT, FlagFate.NO_EFFECT
_RESTRICT: Final = "use Triton(security_config=TritonSecurityConfig(access_token=…, restricted_endpoints=…))"
#: TritonOptions with another meaning than for a server that reads a repository.
_OWN_FLAGS: Final = {
    name: TritonFlag(name, kind, fate, text)
    for name, kind, fate, text in (
        ("model-repository", _TEXT, _INEFFECTIVE, "models are bound, and no repository is read"),
        ("log-file", _TEXT, _INEFFECTIVE, "the log goes to stderr"),
        ("http-restricted-api", _TEXT, FlagFate.REFUSED, _RESTRICT),
        ("grpc-restricted-protocol", _TEXT, FlagFate.REFUSED, _RESTRICT),
        ("exit-on-error", FlagKind.BOOLEAN, _INEFFECTIVE, "run() raises what keeps a model from loading"),
    )
}


@dataclass(kw_only=True)
class TritonConfig:
    """PyTriton's options. None leaves an option at its default.

    An option that gpuserve refuses may still be given as False or as an empty list. Raise
    PyTritonValidationError if neither HTTP nor gRPC is allowed.
    """

    model_repository: Path | None = None
    id: str | None = None
    log_verbose: int | None = None
    log_file: Path | None = None
    exit_timeout_secs: int | None = None
    exit_on_error: bool | None = None
    strict_readiness: bool | None = None
    allow_http: bool | None = None
    http_address: str | None = None
    http_port: int | None = None
    http_header_forward_pattern: str | None = None
    http_thread_count: int | None = None
    http_restricted_api: str | None = None
    allow_grpc: bool | None = None
    grpc_address: str | None = None
    grpc_port: int | None = None
    grpc_header_forward_pattern: str | None = None
    grpc_infer_allocation_pool_size: int | None = None
    grpc_use_ssl: bool | None = None
    grpc_use_ssl_mutual: bool | None = None
    grpc_server_cert: Path | None = None
    grpc_server_key: Path | None = None
    grpc_root_cert: Path | None = None
    grpc_infer_response_compression_level: str | None = None
    grpc_keepalive_time: int | None = None
    grpc_keepalive_timeout: int | None = None
    grpc_keepalive_permit_without_calls: bool | None = None
    grpc_http2_max_pings_without_data: int | None = None
    grpc_http2_min_recv_ping_interval_without_data: int | None = None
    grpc_http2_max_ping_strikes: int | None = None
    grpc_restricted_protocol: str | None = None
    allow_metrics: bool | None = None
    allow_gpu_metrics: bool | None = None
    allow_cpu_metrics: bool | None = None
    metrics_interval_ms: int | None = None
    metrics_port: int | None = None
    metrics_address: str | None = None
    metrics_config: list[str] | None = None
    allow_sagemaker: bool | None = None
    sagemaker_port: int | None = None
    sagemaker_safe_port_range: str | None = None
    sagemaker_thread_count: int | None = None
    allow_vertex_ai: bool | None = None
    vertex_ai_port: int | None = None
    vertex_ai_thread_count: int | None = None
    vertex_ai_default_model: str | None = None
    trace_config: list[str] | None = None
    cache_config: list[str] | None = None
    cache_directory: str | None = None
    buffer_manager_thread_count: int | None = None

    def __post_init__(self) -> None:
        if self.allow_http is False and self.allow_grpc is False:
            raise PyTritonValidationError("The `http` or `grpc` endpoint has to be allowed.")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Return options of their types, without unknown ones; raise PyTritonValidationError for others."""
        known = _option_types()
        unknown = sorted(name for name in config if name not in known)
        if unknown:
            listed = ", ".join(unknown), ", ".join(sorted(known))
            logger.warning("No such option of TritonConfig: %s. Known: %s.", *listed)
        values = {name: _option_value(name, known[name], config[name]) for name in config if name in known}
        return cls(**values)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return the options in variables such as ``PYTRITON_TRITON_CONFIG_HTTP_PORT``; raise as
        ``from_dict``. The items of a list are numbered, as ``…_TRACE_CONFIG_0``, or one item has no number.
        """
        variables = os.environ if environ is None else environ
        return cls.from_dict(_options_in_environment(variables))

    def to_dict(self) -> dict[str, Any]:
        """Return every option by name, None if the option is at its default."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def flag_of(name: str) -> TritonFlag:
    """Return the flag of Triton's server for an option, with what gpuserve does with the flag."""
    flag = name.replace("_", "-")
    return _OWN_FLAGS.get(flag) or BY_NAME[flag]


def merged_configs(*configs: TritonConfig | None) -> TritonConfig:
    """Return the options of all configs. The last config that sets an option counts."""
    together: dict[str, Any] = {}
    for config in configs:
        if config is not None:
            together.update({name: one for name, one in config.to_dict().items() if one is not None})
    return TritonConfig(**together)


@functools.cache
def _option_types() -> dict[str, Any]:
    return {name: typing.get_args(hint)[0] for name, hint in typing.get_type_hints(TritonConfig).items()}


def _options_in_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    items: dict[str, dict[int, str]] = {}
    known = _option_types()
    for variable, text in variables.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        indexed = _INDEXED.fullmatch(name)
        if indexed is not None and known.get(indexed[1]) == list[str]:
            items.setdefault(indexed[1], {})[int(indexed[2])] = text
        else:
            found[name] = text
    return found | {name: [texts[one] for one in sorted(texts)] for name, texts in items.items()}


def _option_value(name: str, kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if kind == list[str]:
        return [value] if isinstance(value, str) else [str(one) for one in value]
    try:
        if kind is bool and isinstance(value, str):
            return _BOOLEANS[value.strip().lower()]
        return kind(value)
    except (TypeError, ValueError, KeyError):
        expected = {bool: "true or false", int: "an integer", Path: "a path"}.get(kind, "a string")
        raise PyTritonValidationError(f"TritonConfig.{name}: expected {expected}, given {value!r}") from None


VALID_TRITON_ENDPOINTS: Final = set(ENDPOINT_GROUPS) - {ADMIN, DASHBOARD}
DEFAULT_PROTECTED_ENDPOINTS: Final = ("shared-memory", "model-repository", "statistics", "trace", "logging")
TRITON_ACCESS_HEADER: Final = HEADERS[HTTP]
_TOKEN_NBYTES: Final = 32


@dataclass
class TritonSecurityConfig:
    """The endpoints that need ``access_token``: by default those that change or watch the server, with a
    random token. Raise PyTritonValidationError for unknown endpoints and tokens that no header can carry.
    """

    access_token: str | None = None
    restricted_endpoints: list[str] | None = None

    def __post_init__(self) -> None:
        if self.restricted_endpoints is None:
            self.restricted_endpoints = list(DEFAULT_PROTECTED_ENDPOINTS)
        if self.access_token is None and self.restricted_endpoints:
            self.access_token = secrets.token_urlsafe(_TOKEN_NBYTES)
        if unknown := [one for one in self.restricted_endpoints if one not in ENDPOINT_GROUPS]:
            valid = ", ".join(sorted(VALID_TRITON_ENDPOINTS))
            given = ", ".join(map(str, unknown))
            raise PyTritonValidationError(f"Invalid endpoint names: {given}. Valid endpoints are: {valid}")
        with pytriton_errors():
            restricted = tuple(self.restricted_endpoints)
            checked_settings(ServerSettings(restricted_endpoints=restricted, access_token=self.access_token))


def server_settings(config: TritonConfig, security: TritonSecurityConfig) -> ServerSettings:
    """Return the options' server settings; raise PyTritonValidationError for refused ones, with advice."""
    settings: dict[str, Any] = {} if config.id is not None else {"compat_name": TRITON}
    tables: dict[str, dict[str, Any]] = {"trace": {}, "log": {}}
    given: list[tuple[TritonFlag, Any]] = [(flag_of(name), value) for name, value in config.to_dict().items()]
    options = TritonOptions(given, lambda name: name.replace("-", "_"))
    try:
        converted = convert_options(options)
    except OptionProblem as problem:
        text = f"TritonConfig.{options.spell(problem.option)}: {problem.text}"
        raise PyTritonValidationError(text) from None
    for (key, *inner), value, _ in converted.settings:
        if inner:
            tables[key][inner[0]] = value
        else:
            settings[key] = value
    given_trace = TraceSettings(**tables["trace"])
    try:
        check_trace(given_trace)
    except ConfigError as error:
        raise PyTritonValidationError(f"TritonConfig.trace_config: {error}") from None
    return ServerSettings(
        **settings,
        model_control=EXPLICIT,  # as in PyTriton: authorized clients unload and load models
        trace=given_trace,
        log=LogOptions(**tables["log"]),
        restricted_endpoints=tuple(security.restricted_endpoints or ()),
        access_token=security.access_token,
    )


def ineffective_options(config: TritonConfig) -> list[str]:
    """Return the given options that have no effect in gpuserve."""
    given = config.to_dict().items()
    return [name for name, value in given if value is not None and flag_of(name).fate is FlagFate.NO_EFFECT]
