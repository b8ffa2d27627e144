"""Requests of the v2 protocol: validated requests and responses, their limits and checks, and the JSON and
protobuf forms of settings, statistics and model configurations. No module here imports schedulers, models or
services.
"""

from __future__ import annotations
