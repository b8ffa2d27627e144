"""``TritonConfig``: PyTriton's options, which are flags of Triton's server; what becomes of each is in the
table of those. Where it is read from, keyword arguments, a dictionary or the environment, its values mean the
same.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.compat.tritonserver.flags import BY_NAME, Fate, Flag, Kind

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX: Final = "PYTRITON_TRITON_CONFIG_"
_INDEXED: Final = re.compile(r"(.+)_(\d+)")
_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off", ""})


_RESTRICT: Final = "use Triton(security_config=TritonSecurityConfig(access_token=…, restricted_endpoints=…))"
#: What options are here that mean something else to a server that reads a repository.
_OWN: Final = {
    flag.name: flag
    for flag in (
        Flag("model-repository", Kind.TEXT, Fate.NO_EFFECT, "models are bound, and no repository is read"),
        Flag("log-file", Kind.TEXT, Fate.NO_EFFECT, "the log goes to stderr"),
        Flag("http-restricted-api", Kind.TEXT, Fate.REFUSED, _RESTRICT),
        Flag("grpc-restricted-protocol", Kind.TEXT, Fate.REFUSED, _RESTRICT),
        Flag("exit-on-error", Kind.BOOLEAN, Fate.NO_EFFECT, "run() raises what keeps a model from loading"),
    )
}


@dataclass(kw_only=True)
class TritonConfig:
    """PyTriton's options. None leaves one to its default. Options that are refused may be given what they
    are here anyway: False, or an empty list.

    Raises:
        PyTritonValidationError: neither HTTP nor gRPC is allowed.
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
        """The options in a dictionary. Values are read as their type. What is no option is told and left out.

        Raises:
            PyTritonValidationError: a value is not of its option's type.
        """
        known = _options()
        unknown = [name for name in config if name not in known]
        if unknown:
            logger.warning("No such option of TritonConfig: %s. Known: %s.", _listed(unknown), _listed(known))
        return cls(**{name: _read(name, known[name], config[name]) for name in config if name in known})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The options in the environment: ``PYTRITON_TRITON_CONFIG_HTTP_PORT``; lists item by item, as
        ``…_TRACE_CONFIG_0``, in the order of their numbers, or as one item without a number.

        Raises:
            PyTritonValidationError: a value is not of its option's type.
        """
        variables = os.environ if environ is None else environ
        return cls.from_dict(_by_name(variables))

    def to_dict(self) -> dict[str, Any]:
        """Every option by name, None where it is left to its default."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def flag_of(name: str) -> Flag:
    """The flag of Triton's server that an option is, with what gpuserve does with it."""
    flag = name.replace("_", "-")
    return _OWN.get(flag) or BY_NAME[flag]


def merged(*configs: TritonConfig | None) -> TritonConfig:
    """The options of all of them; the last that says something counts."""
    together: dict[str, Any] = {}
    for config in configs:
        if config is not None:
            together.update({name: one for name, one in config.to_dict().items() if one is not None})
    return TritonConfig(**together)


@functools.cache
def _options() -> dict[str, Any]:
    """The type that each option is read as, by its name."""
    return {name: typing.get_args(hint)[0] for name, hint in typing.get_type_hints(TritonConfig).items()}


def _by_name(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    items: dict[str, dict[int, str]] = {}
    known = _options()
    for variable, text in variables.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        indexed = _INDEXED.fullmatch(name)
        if indexed is not None and _is_list(known, indexed[1]):
            items.setdefault(indexed[1], {})[int(indexed[2])] = text
        else:
            found[name] = text
    return found | {name: [texts[one] for one in sorted(texts)] for name, texts in items.items()}


def _is_list(known: Mapping[str, Any], name: str) -> bool:
    return name in known and known[name] == list[str]


def _read(name: str, kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if kind == list[str]:
        return [value] if isinstance(value, str) else [str(one) for one in value]
    try:
        return _boolean(value) if kind is bool else kind(value)
    except (TypeError, ValueError):
        raise PyTritonValidationError(
            f"TritonConfig.{name}: expected {_expected(kind)}, given {value!r}"
        ) from None


def _boolean(value: Any) -> bool:
    if not isinstance(value, str):
        return bool(value)
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(value)
    return word in _TRUE


def _expected(kind: Any) -> str:
    return {bool: "true or false", int: "an integer", Path: "a path"}.get(kind, "a string")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
