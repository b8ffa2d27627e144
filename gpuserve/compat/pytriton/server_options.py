"""From ``TritonConfig`` and ``TritonSecurityConfig`` to ``ServerSettings``. Pure."""

from __future__ import annotations

from typing import Any

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.compat.pytriton.security import TritonSecurityConfig
from gpuserve.compat.pytriton.triton_config import TritonConfig, flag_of
from gpuserve.compat.tritonserver.flags import Fate, Flag
from gpuserve.compat.tritonserver.meaning import Meaning, Options, meaning_of
from gpuserve.compat.tritonserver.words import OptionProblem
from gpuserve.config.settings.checks import check_trace
from gpuserve.config.settings.server import EXPLICIT, TRITON, ServerSettings, TraceSettings
from gpuserve.core.errors import ConfigError


def server_settings(config: TritonConfig, security: TritonSecurityConfig) -> ServerSettings:
    """The settings that the options mean. Raises PyTritonValidationError: an option is refused; the text says
    what to use instead.
    """
    settings: dict[str, Any] = {} if config.id is not None else {"compat_name": TRITON}
    trace: dict[str, Any] = {}
    for (key, *inner), value, _ in _meaning(config).settings:
        if inner:
            trace[inner[0]] = value
        else:
            settings[key] = value
    return ServerSettings(
        **settings,
        model_control=EXPLICIT,  # as PyTriton has it: who may, unloads a model and loads it again
        trace=_checked(TraceSettings(**trace)),
        restricted_endpoints=tuple(security.restricted_endpoints or ()),
        access_token=security.access_token,
    )


def without_effect(config: TritonConfig) -> list[str]:
    """The options that are given and do nothing here."""
    given = config.to_dict().items()
    return [name for name, value in given if value is not None and flag_of(name).fate is Fate.NO_EFFECT]


def _meaning(config: TritonConfig) -> Meaning:
    given: list[tuple[Flag, Any]] = [(flag_of(name), value) for name, value in config.to_dict().items()]
    options = Options(given, lambda name: name.replace("-", "_"))
    try:
        return meaning_of(options)
    except OptionProblem as problem:
        raise PyTritonValidationError(
            f"TritonConfig.{options.spell(problem.option)}: {problem.text}"
        ) from None


def _checked(trace: TraceSettings) -> TraceSettings:
    try:
        check_trace(trace)
    except ConfigError as error:
        raise PyTritonValidationError(f"TritonConfig.trace_config: {error}") from None
    return trace
