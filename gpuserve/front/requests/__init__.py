"""Requests of the v2 protocol: types, limits, checks, JSON and protobuf. Imports no models or services."""

from __future__ import annotations
