"""The ``trace`` mapping of ``server``: how requests are traced from the start on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuserve.config.fields import Entry
from gpuserve.settings import TraceSettings

_DEFAULTS = TraceSettings()


class TraceEntry(Entry):
    """Tracing of requests. Clients may change the first four keys while the server runs."""

    level: tuple[Literal["TIMESTAMPS", "TENSORS"], ...] = Field(
        default=_DEFAULTS.level,  # type: ignore[arg-type]  # the default is empty
        strict=False,
        description="What is noted of a traced request: any of TIMESTAMPS and TENSORS; empty traces nothing.",
    )
    rate: int = Field(
        default=_DEFAULTS.rate, ge=1, lt=1 << 32, description="One in so many requests is traced."
    )
    count: int = Field(
        default=_DEFAULTS.count, ge=-1, lt=1 << 31, description="How many are traced in all; -1 is no limit."
    )
    log_frequency: int = Field(
        default=_DEFAULTS.log_frequency,
        ge=0,
        lt=1 << 32,
        description="How many traces go into one file; 0 puts all into one.",
    )
    file: str = Field(default=_DEFAULTS.file, description="The file that mode triton writes, as JSON.")
    mode: Literal["triton", "opentelemetry"] = Field(
        default=_DEFAULTS.mode,  # type: ignore[arg-type]  # the default is one of the two words
        description="triton writes a file; opentelemetry sends spans, and needs gpuserve[otel].",
    )
    url: str = Field(
        default=_DEFAULTS.url,
        pattern=r"^https?://[^\s/]",
        description="Where mode opentelemetry sends spans, as OTLP over HTTP.",
    )
    resource: dict[str, str] = Field(
        default=_DEFAULTS.resource, description="Attributes of the OpenTelemetry resource."
    )
