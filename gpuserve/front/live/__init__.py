"""The data of the live page, sampled once for all subscribers."""

from __future__ import annotations
