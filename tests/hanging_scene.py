"""Models of ``models/hanging.py`` as entries of a config file."""

from __future__ import annotations

from typing import Any, Final

from operated import MODELS

LIMIT_S: Final = 0.5


def entry(name: str, target: str, **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{MODELS / 'hanging.py'}:{target}",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [
            {"name": "y", "dtype": "float32", "shape": [-1]},
            {"name": "pid", "dtype": "int64", "shape": [-1]},
            {"name": "calls", "dtype": "int64", "shape": [-1]},
        ],
        "max_batch_size": 8,
        "execution_timeout_s": LIMIT_S,
        **keys,
    }
