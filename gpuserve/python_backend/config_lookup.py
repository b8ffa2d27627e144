"""What a ``model.py`` looks up in the model configuration that it is given. Pure functions of plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of an input; None where there is none of this name."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of an output; None where there is none of this name."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a model gives any number of responses to a request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(entries: Any, name: str) -> dict[str, Any] | None:
    for entry in entries:
        if entry.get("name") == name:
            found: dict[str, Any] = entry
            return found
    return None
