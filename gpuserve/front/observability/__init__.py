"""Observability of a front: access log, metrics, request traces, GPU health, and the live page."""

from __future__ import annotations
