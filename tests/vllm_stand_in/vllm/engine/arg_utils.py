"""The arguments of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AsyncEngineArgs:
    model: str
    enable_lora: bool = False
    max_model_len: int | None = None
