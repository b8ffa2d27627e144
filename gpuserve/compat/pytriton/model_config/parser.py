"""``ModelConfigParser``: the conversion of a server's answer, or of a file, to a configuration object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuserve.client.client_config import ClientModelConfig, parse_model_config
from gpuserve.compat.pytriton.exceptions import PyTritonModelConfigError


class ModelConfigParser:
    """A reader of configurations with the names of protobuf's fields."""

    @classmethod
    def from_dict(cls, model_config_dict: Mapping[str, Any]) -> ClientModelConfig:
        """Return the configuration in a server's JSON.

        Raises:
            PyTritonModelConfigError: if a value is missing or invalid.
        """
        try:
            return parse_model_config(model_config_dict)
        except KeyError as error:
            raise PyTritonModelConfigError(f"The model configuration has no {error}.") from error
        except (TypeError, ValueError) as error:
            raise PyTritonModelConfigError(f"The model configuration cannot be read: {error}") from error

    @classmethod
    def from_file(cls, *, config_path: Path) -> ClientModelConfig:
        """Return the configuration in a ``config.pbtxt``.

        Raises:
            PyTritonModelConfigError: if the file cannot be read.
        """
        from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
        from tritonclient.grpc import model_config_pb2

        try:
            message = text_format.Parse(Path(config_path).read_text(), model_config_pb2.ModelConfig())
        except (OSError, text_format.ParseError) as error:
            raise PyTritonModelConfigError(f"{config_path} cannot be read: {error}") from error
        return cls.from_dict(json_format.MessageToDict(message, preserving_proto_field_name=True))
