"""Which callable runs a model of a backend, and with which arguments; and which backends this server does not
have, with what to do about it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuserve.options import nearest

ENSEMBLE: Final = "ensemble"
PYTHON: Final = "python"
ONNXRUNTIME: Final = "onnxruntime"
PYTORCH: Final = "pytorch"


@dataclass(frozen=True)
class Backend:
    """A kind of model that is served. ``files`` are the names that its file may have without being told, the
    usual one first; ``parameters`` are those of a config.pbtxt that are keyword arguments of the callable,
    with their names there and what reads them; one that ``takes_config`` is given all of them. ``options``
    is what its models need besides, ``platform`` what clients are told.
    """

    name: str
    callable: str
    files: tuple[str, ...]
    parameters: Mapping[str, tuple[str, Callable[[str], Any]]] = field(default_factory=dict)
    takes_config: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    platform: str = ""


def _one_of(words: Mapping[str, Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}, given {text!r}")
        return words[text]

    return read


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"expected a number of at least 0, given {text!r}")
    return int(text)


_FLAG: Final = _one_of({"0": False, "1": True, "false": False, "true": True})
_ONNX_PARAMETERS: Final = {
    "intra_op_thread_count": ("intra_op_num_threads", _count),
    "inter_op_thread_count": ("inter_op_num_threads", _count),
    "execution_mode": ("execution_mode", _one_of({"0": "sequential", "1": "parallel"})),
    "enable_mem_arena": ("enable_cpu_mem_arena", _FLAG),
    "enable_mem_pattern": ("enable_mem_pattern", _FLAG),
}


BACKENDS: Final[Mapping[str, Backend]] = {
    one.name: one
    for one in (
        Backend(
            PYTHON,
            "gpuserve.python_backend.model:TritonModel",
            ("model.py",),
            takes_config=True,
            options={"request_details": True, "strict": False},  # as Triton, which lets outputs be left out
        ),
        Backend(
            ONNXRUNTIME,
            "gpuserve.runtimes.onnx:OnnxModel",
            ("model.onnx",),
            _ONNX_PARAMETERS,
            platform="onnxruntime_onnx",
        ),
        Backend(
            PYTORCH,
            "gpuserve.runtimes.pytorch:PytorchModel",
            ("model.pt", "model.pt2"),
            {"INTRA_OP_THREAD_COUNT": ("num_threads", _count), "TRUST": ("trust", _FLAG)},
            options={"array": "torch"},
            platform="pytorch_libtorch",
        ),
    )
}
#: The older names of backends.
_PLATFORMS: Final = {"onnxruntime_onnx": ONNXRUNTIME, "pytorch_libtorch": PYTORCH}
_ONNX: Final = 'with backend: "onnxruntime"'
_OWN: Final = 'in a model.py of backend: "python"'
_TENSORFLOW: Final = f"export it to ONNX by tf2onnx and serve that {_ONNX}, or call it {_OWN}"
_TENSORRT: Final = f"serve the ONNX file that it was built from {_ONNX}, or run the engine by tensorrt {_OWN}"
#: What there is in place of a backend that is not here.
_INSTEAD: Final[Mapping[str, str]] = {
    "tensorrt": _TENSORRT,
    "tensorrt_plan": _TENSORRT,
    "tensorflow": _TENSORFLOW,
    "tensorflow_graphdef": _TENSORFLOW,
    "tensorflow_savedmodel": _TENSORFLOW,
    "caffe2_netdef": f"export it to ONNX and serve that {_ONNX}",
    "dali": f"run the pipeline by nvidia.dali {_OWN}",
    "openvino": f"serve the ONNX file that it was made from {_ONNX}, or run it by openvino {_OWN}",
    "fil": f"convert the forest to ONNX by skl2onnx or onnxmltools and serve that {_ONNX}, or load it {_OWN}",
    "vllm": f"run the engine {_OWN} that is decoupled",
    "tensorrtllm": f"run the engine by tensorrt_llm {_OWN} that is decoupled",
    "identity": f"give the inputs back {_OWN}",
    "repeat": f"yield the responses {_OWN} that is decoupled",
    "square": f"yield the responses {_OWN} that is decoupled",
}
#: The backend of a file by its usual name, where a config.pbtxt names none.
_BY_FILE: Final = {
    "model.onnx": ONNXRUNTIME,
    "model.pt": PYTORCH,
    "model.pt2": PYTORCH,
    "model.py": PYTHON,
    "model.plan": "tensorrt",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.xml": "openvino",
    "model.dali": "dali",
}


class UnknownBackend(Exception):
    """The model cannot be run here; one sentence that says what to do."""


def backend_name(config: Any, files: Collection[str]) -> str:
    """The backend that a ``ModelConfig`` names, or the files of a version stand for. Raises UnknownBackend:
    the one or the other says none.
    """
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return ENSEMBLE
    platform = _PLATFORMS.get(config.platform, config.platform)
    if name := config.backend or platform:
        return str(_PLATFORMS.get(name, name))
    wanted = [config.default_model_filename] if config.default_model_filename else sorted(files)
    for one in wanted:
        suffixes = [name for name in _BY_FILE if one == name or one.endswith(name.removeprefix("model"))]
        if suffixes and (config.default_model_filename or one in _BY_FILE):
            return _BY_FILE[suffixes[0]]
    there = ", ".join(sorted(files)) or "nothing"
    raise UnknownBackend(
        "no backend is named, and none follows from the files of its version folder "
        f'({there}): expected backend: "python", "onnxruntime" or "pytorch", or platform: "ensemble"'
    )


def backend_of(name: str) -> Backend:
    """Raises UnknownBackend: this server does not have it."""
    if name in BACKENDS:
        return BACKENDS[name]
    known = f"this server has {', '.join(BACKENDS)} and {ENSEMBLE}"
    if name in _INSTEAD:
        raise UnknownBackend(f"there is no backend {name!r} here ({known}): {_INSTEAD[name]}")
    raise UnknownBackend(f"there is no backend {name!r}{nearest(name, BACKENDS)}; {known}; or call it {_OWN}")
