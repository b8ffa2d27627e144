"""Triton backends: the callable that runs a model of each, and what to use instead of unsupported ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.backends.batch_tensors import batch_tensors_in
from gpuserve.backends.registry import backend_of, source_of
from gpuserve.backends.sequences import states_in
from gpuserve.config.triton.folders import ModelFolder
from gpuserve.config.triton.pbtxt import EntryDraft, listed
from gpuserve.core.suggestions import nearest
from gpuserve.model.triton_config import plain

ENSEMBLE: Final = "ensemble"
PYTHON: Final = "python"
ONNXRUNTIME: Final = "onnxruntime"
PYTORCH: Final = "pytorch"


@dataclass(frozen=True)
class Backend:
    """A kind of model that is served, by the ``callable`` at an import path. ``files`` are the default names
    of the model file, the usual one first; ``options`` are those of all models. ``parameters`` of a
    config.pbtxt are arguments of the callable, each with its reader; a callable that ``takes_config``
    receives all of it. ``platform`` is for clients.
    """

    name: str
    callable: str
    files: tuple[str, ...]
    parameters: Mapping[str, tuple[str, Callable[[str], Any]]] = field(default_factory=dict)
    takes_config: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    platform: str = ""


def _one_of(text: str, words: Mapping[str, Any]) -> Any:
    if text not in words:
        raise ValueError(f"expected one of {', '.join(words)}, given {text!r}")
    return words[text]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"expected a number of at least 0, given {text!r}")
    return int(text)


_FLAG: Final = partial(_one_of, words={"0": False, "1": True, "false": False, "true": True})
_ONNX_PARAMETERS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "intra_op_thread_count": ("intra_op_num_threads", _count),
    "inter_op_thread_count": ("inter_op_num_threads", _count),
    "execution_mode": ("execution_mode", partial(_one_of, words={"0": "sequential", "1": "parallel"})),
    "enable_mem_arena": ("enable_cpu_mem_arena", _FLAG),
    "enable_mem_pattern": ("enable_mem_pattern", _FLAG),
}
# fmt: off
BACKENDS: Final[Mapping[str, Backend]] = {
    one.name: one
    for one in (
        Backend(PYTHON, "gpuserve.backends.python_backend.triton_model:TritonModel", ("model.py",),
            takes_config=True,
            options={"request_details": True, "strict": False}),  # as in Triton: outputs may be left out
        Backend(ONNXRUNTIME, "gpuserve.backends.onnx:OnnxModel", ("model.onnx",), _ONNX_PARAMETERS,
            platform="onnxruntime_onnx"),
        Backend(PYTORCH, "gpuserve.backends.pytorch:PytorchModel", ("model.pt", "model.pt2"),
            {"INTRA_OP_THREAD_COUNT": ("num_threads", _count), "TRUST": ("trust", _FLAG)},
            options={"array": "torch"}, platform="pytorch_libtorch"),
    )
}
# fmt: on
#: Platforms, the older names of backends.
_PLATFORMS: Final = {"onnxruntime_onnx": ONNXRUNTIME, "pytorch_libtorch": PYTORCH}
_ONNX: Final = 'with backend: "onnxruntime"'
_OWN: Final = 'in a model.py of backend: "python"'
_TENSORFLOW: Final = f"export it to ONNX by tf2onnx and serve that {_ONNX}, or call it {_OWN}"
_TENSORRT: Final = f"serve the ONNX file that it was built from {_ONNX}, or run the engine by tensorrt {_OWN}"
#: Alternatives to backends that this server does not have.
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
#: The backend by the usual name of the model file, if a config.pbtxt names none.
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
    """A model that cannot be run here; the text is one sentence that says what to do."""


def backend_name(config: Any, files: Collection[str]) -> str:
    """Return the backend of a ``ModelConfig``, or by a version's files; raise UnknownBackend if none."""
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


def triton_backend_of(name: str) -> Backend:
    if name in BACKENDS:
        return BACKENDS[name]
    known = f"this server has {', '.join(BACKENDS)} and {ENSEMBLE}"
    if name in _INSTEAD:
        raise UnknownBackend(f"there is no backend {name!r} here ({known}): {_INSTEAD[name]}")
    raise UnknownBackend(f"there is no backend {name!r}{nearest(name, BACKENDS)}; {known}; or call it {_OWN}")


#: The callable around models whose shapes differ from the shapes that clients see.
_RESHAPED: Final = "gpuserve.config.triton.reshaping:ReshapedModel"
#: The parameter with the environment of a Python model, and the placeholder of the model folder in it.
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
_MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY"


def callable_of(draft: EntryDraft, backend: Backend, folder: ModelFolder, version: int) -> dict[str, Any]:
    """Return a version's callable, arguments and backend options; {} if there is a fault."""
    _check_batch_tensors(draft, backend)
    if draft.message.sequence_batching.iterative_sequence and backend.name != PYTHON:
        text = f"iterative_sequence goes with backend {PYTHON}: only a model.py reschedules its requests"
        draft.add_fault(("sequence_batching", "iterative_sequence"), text)
    if draft.message.sequence_batching.state:
        _check_states(draft, backend)
    if draft.faults:
        return {}
    return _with_own_shapes(draft, _callable(draft, backend, folder, version))


def _check_batch_tensors(draft: EntryDraft, backend: Backend) -> None:
    config = draft.message
    inputs, outputs = ({one.name for one in tensors} for tensors in (config.input, config.output))
    for key in ("batch_input", "batch_output"):
        for number, one in enumerate(getattr(config, key)):
            place = (key, number)
            if backend.name == PYTORCH:
                text = f"{key} goes with backend {ONNXRUNTIME} or {PYTHON}; this one receives padded inputs"
                draft.add_fault(place, text)
            if len(one.source_input) != 1 or one.source_input[0] not in inputs:
                given = listed(list(one.source_input)) or "none"
                text = f"expected one source_input, an input of the model ({listed(sorted(inputs))})"
                draft.add_fault((*place, "source_input"), f"{text}, given {given}")
            for name in one.target_name:
                if key == "batch_input" and name in inputs:
                    draft.add_fault((*place, "target_name"), f"{name!r} is an input that clients give")
                if key == "batch_output" and name not in outputs:
                    draft.add_fault((*place, "target_name"), f"the model has no output {name!r}")
            if key == "batch_input" and one.data_type not in {pb.TYPE_INT32, pb.TYPE_FP32}:
                draft.add_fault((*place, "data_type"), "expected data_type TYPE_INT32 or TYPE_FP32")


def _check_states(draft: EntryDraft, backend: Backend) -> None:
    config = draft.message
    place: tuple[str | int, ...] = ("sequence_batching", "state")
    if backend.name == PYTHON:
        text = (
            f"state goes with backend {ONNXRUNTIME} or {PYTORCH}; a model.py keeps it by the correlation id"
        )
        draft.add_fault(place, text)
    if config.batch_input or any(one.allow_ragged_batch for one in config.input):
        draft.add_fault(place, "state does not go with batch_input or allow_ragged_batch")
    names = [one.name for one in config.input]
    for number, one in enumerate(config.sequence_batching.state):
        at = (*place, number)
        if one.data_type == pb.TYPE_INVALID:
            draft.add_fault(at, "the state has no data_type; expected one such as TYPE_FP32")
        if not (one.input_name and one.output_name) or one.input_name in names:
            text = "expected an input_name that is no other input, and an output_name"
            draft.add_fault((*at, "input_name"), f"{text}, given {one.input_name!r} and {one.output_name!r}")
        names.append(one.input_name)
        if len(one.initial_state) > 1:
            draft.add_fault((*at, "initial_state"), "expected one initial_state at most")
        for initial in one.initial_state:
            if problem := _initial_state_problem(one, initial):
                draft.add_fault((*at, "initial_state"), f"initial_state of {one.input_name!r}: {problem}")


def _initial_state_problem(state: Any, initial: Any) -> str | None:
    if initial.data_type != state.data_type:
        return "expected the data_type of the state"
    if not initial.name:
        return "expected a name"
    if initial.WhichOneof("state_data") is None:
        return "expected zero_data: true or data_file"
    sizes = list(initial.dims), list(state.dims)
    fits = len(sizes[0]) == len(sizes[1]) and all(size in (one, -1) for one, size in zip(*sizes, strict=True))
    return None if fits and -1 not in sizes[0] else f"expected dims that fit those of the state, {sizes[1]}"


def _callable(draft: EntryDraft, backend: Backend, folder: ModelFolder, version: int) -> dict[str, Any]:
    config = draft.message
    names = (config.default_model_filename,) if config.default_model_filename else backend.files
    there = folder.versions[version]
    found = next((one for one in names if one.split("/")[0] in there), None)
    if found is None:
        path = os.path.join(folder.path, str(version))
        draft.add_fault(
            ("default_model_filename",),
            f"there is no {' or '.join(names)} in {path}, which has {listed(sorted(there) or ['no file'])}",
        )
        return {}
    if backend.takes_config:
        model_dir = os.path.abspath(folder.path)
        arguments: dict[str, Any] = {
            "model_dir": model_dir,
            "version": str(version),
            "file": found,
            "config": json.dumps(plain(normalized(draft, backend))),
        }
        source = {"callable": backend.callable, "kwargs": arguments, **backend.options}
        if _ENVIRONMENT in config.parameters:
            environment = config.parameters[_ENVIRONMENT].string_value.replace(_MODEL_FOLDER, model_dir)
            source["python"] = os.path.join(model_dir, environment)
            draft.record_origin(("python",), ("parameters", _ENVIRONMENT))
        return source
    path, arguments = folder.file(version, found), _parameters(draft, backend)
    if tensors := batch_tensors_in(plain(draft.message)):
        arguments["batch_tensors"] = tensors
    if states := states_in(plain(draft.message), folder.path):
        arguments["states"] = states
    known = backend_of(path)
    if known is None or known.path != backend.callable:  # the name does not imply the callable
        return {"callable": backend.callable, "kwargs": {"file": path, **arguments}, **backend.options}
    return {"callable": path, "kwargs": arguments, **backend.options}


def _with_own_shapes(draft: EntryDraft, source: dict[str, Any]) -> dict[str, Any]:
    """Return the callable, wrapped if the model's shapes differ from the shapes that clients see."""
    inputs, outputs = (
        {one.name: [list(one.dims), list(one.reshape.shape)] for one in tensors if one.HasField("reshape")}
        for tensors in (draft.message.input, draft.message.output)
    )
    if not source or not (inputs or outputs):
        return source
    outputs = {name: shapes[::-1] for name, shapes in outputs.items()}  # from the model's to the client's
    path, kwargs = source_of(source["callable"], source["kwargs"], ".")
    arguments = {"path": path, "kwargs": kwargs, "inputs": inputs, "outputs": outputs}
    return source | {"callable": _RESHAPED, "kwargs": arguments}


def _parameters(draft: EntryDraft, backend: Backend) -> dict[str, Any]:
    """Return the arguments in a config.pbtxt's parameters; note parameters without effect."""
    found: dict[str, Any] = {}
    for name, value in draft.message.parameters.items():
        if name in backend.parameters:
            argument, read = backend.parameters[name]
            try:
                found[argument] = read(value.string_value)
            except ValueError as error:
                draft.add_fault(("parameters", name), f"parameter {name!r}: {error}")
        else:
            draft.add_note(
                ("parameters", name),
                f"parameter {name!r} has no effect: backend {backend.name} takes none of it here",
            )
    return found


def normalized(draft: EntryDraft, backend: Backend | None) -> Any:
    """Return the ``ModelConfig`` as Triton completes it: names, backend, file and version policy."""
    config = pb.ModelConfig()
    config.CopyFrom(draft.message)
    config.name = draft.name
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if backend is None:
        config.platform = ENSEMBLE
        return config
    config.platform = config.platform or backend.platform
    config.backend = backend.name
    config.default_model_filename = config.default_model_filename or backend.files[0]
    return config
