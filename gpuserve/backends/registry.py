"""The registry of backends for model files: which class serves a file, by its suffix, or a folder, by its
content.

No library of a backend is imported, and files are not opened. A name on the hub of Hugging Face, hf:NAME, is
passed on as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class FileBackend(NamedTuple):
    """A kind of model file or, without suffixes, of folder. ``path`` is the import path of its class, which
    is created with ``file`` and the model's ``kwargs``.
    """

    title: str
    path: str
    suffixes: tuple[str, ...] = ()


FILE_BACKENDS: Final = (
    FileBackend("an ONNX model", "gpuserve.backends.onnx:OnnxModel", (".onnx", ".ort")),
    FileBackend(
        "a program of PyTorch",
        "gpuserve.backends.pytorch:PytorchModel",
        (".pt2", ".pt", ".pth", ".torchscript"),
    ),
    FileBackend(
        "a model of scikit-learn",
        "gpuserve.backends.sklearn:SklearnModel",
        (".skops", ".joblib", ".pkl", ".pickle"),
    ),
    FileBackend(
        "a folder of Hugging Face, with a config.json", "gpuserve.backends.huggingface:HuggingFaceModel"
    ),
)
_HUGGINGFACE: Final = FILE_BACKENDS[-1]
#: The classes that run a folder of Hugging Face, by the ``runtime`` of the model.
VLLM: Final = "vllm"
RUNTIMES: Final = {
    "transformers": _HUGGINGFACE.path,
    VLLM: "gpuserve.backends.vllm:VllmModel",
}
#: Prefix of a name on the hub of Hugging Face.
HUB: Final = "hf:"
FILE_SUFFIXES: Final = tuple(suffix for one in FILE_BACKENDS for suffix in one.suffixes)
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


def is_model_path(text: str) -> bool:
    """Return whether a text names a model file or folder: by a known suffix, or as a path without suffix."""
    if text.startswith(HUB):
        return True
    if ":" in text:
        return False
    return text.lower().endswith(FILE_SUFFIXES) or (os.sep in text and "." not in os.path.basename(text))


def backend_of(path: str) -> FileBackend | None:
    """Return the backend of a file or folder, or None if there is none."""
    if path.startswith(HUB) or os.path.isfile(os.path.join(path, "config.json")):
        return _HUGGINGFACE
    if os.path.isdir(path):
        return None
    return next((one for one in FILE_BACKENDS if path.lower().endswith(one.suffixes)), None)


def path_problem(text: str, base_dir: str) -> str | None:
    """Return the problem of a ``callable`` that is a path, judged by names only, or None."""
    path = _located(text, base_dir)
    if not text.startswith(HUB) and not os.path.exists(path):
        return f"there is no file {text!r} in {base_dir}"
    if backend_of(path) is None:
        return f"{text!r} is no supported model file or folder, expected {supported_files()}"
    return None


def supported_files() -> str:
    """Return every kind of model file, with its suffixes."""
    shown = [
        f"{one.title} ({' or '.join(one.suffixes)})" if one.suffixes else one.title for one in FILE_BACKENDS
    ]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}"


def source_of(
    text: str, kwargs: Mapping[str, Any], base_dir: str, runtime: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the import path and the arguments of a ``callable``: its own, or those of a backend's class. A
    ``runtime`` replaces the class for folders.
    """
    path = _located(text, base_dir)
    found = backend_of(path) if is_model_path(text) else None
    if found is None:
        return text, dict(kwargs)
    return RUNTIMES[runtime] if runtime else found.path, {"file": path, **kwargs}


def _located(text: str, base_dir: str) -> str:
    return text if text.startswith(HUB) else os.path.normpath(os.path.join(base_dir, text))


def name_of(path: str) -> str:
    """Return a model name for a file: the name without the suffix and without invalid characters."""
    stem = os.path.basename(os.path.normpath(path)).removeprefix(HUB)
    for suffix in FILE_SUFFIXES:
        if stem.lower().endswith(suffix):
            stem = stem[: -len(suffix)]
            break
    return _NOT_IN_NAMES.sub("_", stem).lstrip(".-") or "model"
