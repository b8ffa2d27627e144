"""The keyword arguments of a model of Hugging Face: what may be said beside the folder. Checked here,
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.runtimes.missing import ModelFileError

_CHOICES: Final = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "pooling": ("mean", "cls", "none"),
    "image": ("encoded", "array"),
    "audio": ("samples", "encoded"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How a model is to be served.

    ``file`` is a folder, or hf:NAME, ``instances`` how many workers share the processors. ``pooling`` and
    ``normalize`` are for feature-extraction, ``image`` and ``audio`` for what requests bring, ``stream``,
    ``prompts`` and ``batches`` for text-generation: whether it answers token by token, how many prompts are
    in one batch, how many batches run at once. ``options`` go to the pipeline.
    """

    file: str
    device: str = "cpu"
    instances: int = 1
    task: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    pooling: str | None = None
    normalize: bool | None = None
    image: str = "encoded"
    audio: str = "samples"
    stream: bool = True
    prompts: int = 16
    batches: int = 2
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def settings_of(kwargs: Mapping[str, Any]) -> Settings:
    """The settings in the ``kwargs`` of a model.

    Raises:
        ModelFileError: one is not known, missing, or has no such value.
    """
    known = [one.name for one in dataclasses.fields(Settings)]
    unknown = [key for key in kwargs if key not in known]
    if unknown:
        raise ModelFileError(f"kwargs has no key {unknown[0]!r} here; expected some of {', '.join(known)}")
    if not isinstance(kwargs.get("file"), str):
        raise ModelFileError("kwargs needs file, the path of a folder or hf:NAME")
    for key, choices in _CHOICES.items():
        if kwargs.get(key) is not None and kwargs[key] not in choices:
            raise ModelFileError(f"{key} is one of {', '.join(choices)}, got {kwargs[key]!r}")
    for key in ("trust_remote_code", "normalize", "stream"):  # a quoted "false" would count as true
        if not isinstance(kwargs.get(key), bool | None):
            raise ModelFileError(f"{key} is true or false, got {kwargs[key]!r}")
    for key in ("instances", "prompts", "batches"):
        if key in kwargs and (type(kwargs[key]) is not int or kwargs[key] < 1):
            raise ModelFileError(f"{key} is a number of at least 1, got {kwargs[key]!r}")
    if not isinstance(kwargs.get("options", {}), Mapping):
        raise ModelFileError(f"options is a mapping of arguments of the pipeline, got {kwargs['options']!r}")
    return Settings(**kwargs)
