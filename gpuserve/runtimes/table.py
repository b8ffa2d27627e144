"""Which class serves a model file, by its suffix, or a folder, by what lies in it. No library of a runtime is
imported, and of a file no more is looked at than its name. A name on the hub of Hugging Face, hf:NAME, is
none of this machine, and stands for itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple


class Runtime(NamedTuple):
    """A kind of model file. ``path`` is the import path of its class, which is made with ``file`` and what
    the model's ``kwargs`` say. ``looks`` says of a folder whether it is one of this kind. With ``threads``
    the class is also told how many ``instances`` share the processors.
    """

    title: str
    path: str
    suffixes: tuple[str, ...] = ()
    looks: Callable[[str], bool] | None = None
    threads: bool = False


def _is_huggingface(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "config.json"))


RUNTIMES: Final = (
    Runtime("an ONNX model", "gpuserve.runtimes.onnx:OnnxModel", (".onnx", ".ort"), threads=True),
    Runtime(
        "a program of PyTorch",
        "gpuserve.runtimes.pytorch:PytorchModel",
        (".pt2", ".pt", ".pth", ".torchscript"),
        threads=True,
    ),
    Runtime(
        "a model of scikit-learn",
        "gpuserve.runtimes.sklearn:SklearnModel",
        (".skops", ".joblib", ".pkl", ".pickle"),
    ),
    Runtime(
        "a folder of Hugging Face, with a config.json",
        "gpuserve.runtimes.huggingface:HuggingFaceModel",
        looks=_is_huggingface,
        threads=True,
    ),
)
#: In front of a name on the hub of Hugging Face.
HUB: Final = "hf:"
_SUFFIXES: Final = tuple(suffix for one in RUNTIMES for suffix in one.suffixes)
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


def is_model_path(text: str) -> bool:
    """Whether a text, by itself, names a model file or a folder, and no callable: it ends as such files do,
    or is a path without an ending.
    """
    if text.startswith(HUB):
        return True
    if ":" in text:
        return False
    return text.lower().endswith(_SUFFIXES) or (os.sep in text and "." not in os.path.basename(text))


def runtime_of(path: str) -> Runtime | None:
    """What serves this file or folder, if anything does."""
    if path.startswith(HUB):
        return next(one for one in RUNTIMES if one.looks is _is_huggingface)
    if os.path.isdir(path):
        return next((one for one in RUNTIMES if one.looks is not None and one.looks(path)), None)
    return next((one for one in RUNTIMES if path.lower().endswith(one.suffixes)), None)


def path_problem(text: str, base_dir: str) -> str | None:
    """What is wrong with a ``callable`` that is a path, as far as names tell; None for nothing."""
    path = _located(text, base_dir)
    if not text.startswith(HUB) and not os.path.exists(path):
        return f"there is no file {text!r} in {base_dir}"
    if runtime_of(path) is None:
        return f"{text!r} is no model that is known by its look, expected {known_looks()}"
    return None


def known_looks() -> str:
    """Every kind of model file, and how it looks."""
    shown = [f"{one.title} ({' or '.join(one.suffixes)})" if one.suffixes else one.title for one in RUNTIMES]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}"


def source_of(
    text: str, kwargs: Mapping[str, Any], base_dir: str, instances: int = 1
) -> tuple[str, dict[str, Any]]:
    """The import path and the arguments that a ``callable`` stands for: its own, or those of a runtime's
    class. ``instances`` is how many of it share the processors.
    """
    path = _located(text, base_dir)
    found = runtime_of(path) if is_model_path(text) else None
    if found is None:
        return text, dict(kwargs)
    shared = {"instances": instances} if found.threads and instances > 1 else {}
    return found.path, {"file": path, **shared, **kwargs}


def _located(text: str, base_dir: str) -> str:
    return text if text.startswith(HUB) else os.path.normpath(os.path.join(base_dir, text))


def name_of(path: str) -> str:
    """The name of a model that is only known by its file: without the suffix, and what no name may have."""
    stem = os.path.basename(os.path.normpath(path)).removeprefix(HUB)
    for suffix in _SUFFIXES:
        if stem.lower().endswith(suffix):
            stem = stem[: -len(suffix)]
            break
    return _NO_NAME.sub("_", stem).lstrip(".-") or "model"
