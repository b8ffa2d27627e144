"""``TritonConfig``: PyTriton's options, and beside each what becomes of it here. An option is a setting of
ours, part of one (``server_options.py`` puts those together), without effect, or refused. Where it is read
from, keyword arguments, a dictionary or the environment, its values mean the same.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Self

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX: Final = "PYTRITON_TRITON_CONFIG_"
_INDEXED: Final = re.compile(r"(.+)_(\d+)")
_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off", ""})


class OptionMeaning(enum.Enum):
    """What gpuserve does with an option of Triton's server."""

    SETTING = "is a setting of gpuserve"
    PART = "is part of a setting of gpuserve"
    NO_EFFECT = "has no effect"
    REFUSED = "is refused"


@dataclass(frozen=True)
class Meaning:
    """One option here. ``text`` is the name of our setting, or what to use instead."""

    fate: OptionMeaning
    text: str = ""


_PART: Final = Meaning(OptionMeaning.PART)
_NO_EFFECT: Final = Meaning(OptionMeaning.NO_EFFECT)


def _setting(name: str) -> Meaning:
    return Meaning(OptionMeaning.SETTING, name)


def _refused(instead: str) -> Meaning:
    return Meaning(OptionMeaning.REFUSED, instead)


_RESTRICT: Final = "use Triton(security_config=TritonSecurityConfig(access_token=…, restricted_endpoints=…))"
_PLATFORM: Final = "route its requests to the HTTP port by a proxy"
_REPOSITORY: Final = "models are bound, and no repository is read or written; leave it out"


@dataclass(kw_only=True)
class TritonConfig:
    """PyTriton's options. None leaves one to its default. Options that are refused may be given what they
    are here anyway: False, or an empty list.

    Raises:
        PyTritonValidationError: neither HTTP nor gRPC is allowed.
    """

    model_repository: Annotated[Path | None, _refused(_REPOSITORY)] = None
    id: Annotated[str | None, _setting("name")] = None
    log_verbose: Annotated[int | None, _PART] = None
    log_file: Annotated[Path | None, _refused("the log goes to stderr; redirect that")] = None
    exit_timeout_secs: Annotated[int | None, _setting("drain_timeout_s")] = None
    exit_on_error: Annotated[bool | None, _NO_EFFECT] = None
    strict_readiness: Annotated[bool | None, _NO_EFFECT] = None
    allow_http: Annotated[bool | None, _PART] = None
    http_address: Annotated[str | None, _PART] = None
    http_port: Annotated[int | None, _PART] = None
    http_header_forward_pattern: Annotated[str | None, _setting("http_header_forward_pattern")] = None
    http_thread_count: Annotated[int | None, _NO_EFFECT] = None
    http_restricted_api: Annotated[str | None, _refused(_RESTRICT)] = None
    allow_grpc: Annotated[bool | None, _PART] = None
    grpc_address: Annotated[str | None, _PART] = None
    grpc_port: Annotated[int | None, _PART] = None
    grpc_header_forward_pattern: Annotated[str | None, _setting("grpc_header_forward_pattern")] = None
    grpc_infer_allocation_pool_size: Annotated[int | None, _NO_EFFECT] = None
    grpc_use_ssl: Annotated[bool | None, _PART] = None
    grpc_use_ssl_mutual: Annotated[bool | None, _PART] = None
    grpc_server_cert: Annotated[Path | None, _PART] = None
    grpc_server_key: Annotated[Path | None, _PART] = None
    grpc_root_cert: Annotated[Path | None, _PART] = None
    grpc_infer_response_compression_level: Annotated[str | None, _NO_EFFECT] = None
    grpc_keepalive_time: Annotated[int | None, _NO_EFFECT] = None
    grpc_keepalive_timeout: Annotated[int | None, _NO_EFFECT] = None
    grpc_keepalive_permit_without_calls: Annotated[bool | None, _NO_EFFECT] = None
    grpc_http2_max_pings_without_data: Annotated[int | None, _NO_EFFECT] = None
    grpc_http2_min_recv_ping_interval_without_data: Annotated[int | None, _NO_EFFECT] = None
    grpc_http2_max_ping_strikes: Annotated[int | None, _NO_EFFECT] = None
    grpc_restricted_protocol: Annotated[str | None, _refused(_RESTRICT)] = None
    allow_metrics: Annotated[bool | None, _PART] = None
    allow_gpu_metrics: Annotated[bool | None, _NO_EFFECT] = None
    allow_cpu_metrics: Annotated[bool | None, _NO_EFFECT] = None
    metrics_interval_ms: Annotated[int | None, _NO_EFFECT] = None
    metrics_port: Annotated[int | None, _PART] = None
    metrics_address: Annotated[str | None, _PART] = None
    metrics_config: Annotated[list[str] | None, _NO_EFFECT] = None
    allow_sagemaker: Annotated[bool | None, _refused(_PLATFORM)] = None
    sagemaker_port: Annotated[int | None, _refused(_PLATFORM)] = None
    sagemaker_safe_port_range: Annotated[str | None, _refused(_PLATFORM)] = None
    sagemaker_thread_count: Annotated[int | None, _NO_EFFECT] = None
    allow_vertex_ai: Annotated[bool | None, _refused(_PLATFORM)] = None
    vertex_ai_port: Annotated[int | None, _refused(_PLATFORM)] = None
    vertex_ai_thread_count: Annotated[int | None, _NO_EFFECT] = None
    vertex_ai_default_model: Annotated[str | None, _refused(_PLATFORM)] = None
    trace_config: Annotated[list[str] | None, _PART] = None
    cache_config: Annotated[list[str] | None, _PART] = None
    cache_directory: Annotated[str | None, _NO_EFFECT] = None
    buffer_manager_thread_count: Annotated[int | None, _NO_EFFECT] = None

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
        return cls(**{name: _read(name, known[name][0], config[name]) for name in config if name in known})

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


def meaning_of(name: str) -> Meaning:
    """What gpuserve does with the option of this name."""
    return _options()[name][1]


def merged(*configs: TritonConfig | None) -> TritonConfig:
    """The options of all of them; the last that says something counts."""
    together: dict[str, Any] = {}
    for config in configs:
        if config is not None:
            together.update({name: one for name, one in config.to_dict().items() if one is not None})
    return TritonConfig(**together)


@functools.cache
def _options() -> dict[str, tuple[Any, Meaning]]:
    """The type and the meaning of each option."""
    options = {}
    for name, hint in typing.get_type_hints(TritonConfig, include_extras=True).items():
        optional, meaning = typing.get_args(hint)
        options[name] = (typing.get_args(optional)[0], meaning)
    return options


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


def _is_list(known: Mapping[str, tuple[Any, Meaning]], name: str) -> bool:
    return name in known and known[name][0] == list[str]


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
