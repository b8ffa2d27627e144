"""``gpuserve schema``."""

from __future__ import annotations

import json
import sys


def schema() -> None:
    """Print the JSON Schema of config files, for editors.

    Example:
      gpuserve schema > gpuserve.schema.json

    A first line of "# yaml-language-server: $schema=gpuserve.schema.json" in a config file then gives
    completion and checks while it is written.
    """
    from gpuserve.config.schema import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
