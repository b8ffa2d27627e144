"""Ends its process in the middle of a batch."""

from __future__ import annotations

import os
from typing import Any


def now(requests: Any) -> Any:
    os._exit(7)
