"""ONNX models, run by onnxruntime. The file declares the tensors; free first axes make the model batch."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.backends.batch_tensors import BatchTensors
from gpuserve.backends.model_files import (
    DATATYPES,
    MAX_BATCH_SIZE,
    ModelFileError,
    existing_file,
    import_library,
    is_one_row_per_request,
    retry_one_by_one,
    threads_per_instance,
)
from gpuserve.backends.sequences import SequenceStates, without_states
from gpuserve.decorators import batch
from gpuserve.decorators.batch_data import on_host
from gpuserve.decorators.wrapping import served_model
from gpuserve_worker.inference.inference_request import accept_batch
from gpuserve_worker.protocol.tensor import BF16, BYTES, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DATATYPES: Final = {**DATATYPES, "float": "FP32", "double": "FP64", "string": BYTES}
#: ``TensorProto.BFLOAT16``, which numpy has no type for.
_ONNX_BFLOAT16: Final = 16
_LEVELS: Final = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
#: Combinations of input shapes whose bindings are kept.
_MAX_BINDINGS: Final = 64
_MODES: Final = {"sequential": "ORT_SEQUENTIAL", "parallel": "ORT_PARALLEL"}
_NOT_SPINNING: Final = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}


class OnnxModel:
    """A model file of ONNX.

    Args:
        file: Path of the file.
        device: "cpu" or "cuda:0". The latter needs onnxruntime-gpu.
        instances: Number of instances that share the processors, which sets the default number of threads.
        providers: Execution providers in place of the device's: names, or pairs of a name and options.
        session_config: Entries of onnxruntime's session configuration.
        batch_tensors: Arguments of ``BatchTensors``. Ragged inputs then reach the file as arrays with one
            axis; otherwise they are padded with zeros.
        states: Arguments of ``SequenceStates``, if the sequences have implicit state.
        options: Attributes of onnxruntime's ``SessionOptions``, such as intra_op_num_threads.

    Raises:
        ModelFileError: if the file, an option or the device is not usable.
    """

    #: onnxruntime makes new outputs for each run.
    owned_outputs = True

    def __init__(
        self,
        file: str,
        device: str = "cpu",
        instances: int = 1,
        providers: Sequence[Any] = (),
        session_config: Mapping[str, str] | None = None,
        batch_tensors: Mapping[str, Any] | None = None,
        states: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        runtime = _onnxruntime()
        given = {"intra_op_num_threads": threads_per_instance(instances)} | options
        settings = _session_settings(runtime, given, _NOT_SPINNING | dict(session_config or {}))
        on_gpu = device != "cpu"
        if on_gpu and hasattr(runtime, "preload_dlls"):
            # The provider's library has no RUNPATH, so the dynamic loader does not find the wheels of CUDA.
            runtime.preload_dlls()
        cupy = sys.modules.get("cupy") if on_gpu and not providers else None
        self._stream = None if cupy is None else cupy.cuda.Stream(non_blocking=True)
        chosen = _providers(runtime, device, providers, self._stream)
        self._session = _session(runtime, file, settings, chosen)
        self._runtime = runtime
        self._device = device
        self._inputs = {one.name: _datatype_of(one, file) for one in self._session.get_inputs()}
        self._states = None
        if states is not None:
            # onnxruntime takes a state from the host for any device.
            self._states = SequenceStates(**states, place=lambda one: on_host(one[:]).copy())
            _check_states(self._states, self._inputs, file)
            self.sequence_dropped = self._states.drop
        self._outputs = _wanted_outputs(self._session, file, self._states)
        self._in_bfloat16 = BF16 in {*self._inputs.values(), *self._outputs.values()}
        self._has_strings = BYTES in self._inputs.values()
        self._batch_tensors = BatchTensors(**batch_tensors) if batch_tensors else None
        self._is_single = is_one_row_per_request(
            {one.name: len(one.shape) for one in self._session.get_inputs()}
        )
        place = ("cuda", _device_number(device))
        self._on_device = BoundRuns(runtime, self._session, self._inputs, self._outputs, place, self._stream)

    @classmethod
    def declare(
        cls,
        file: str,
        device: str = "cpu",
        instances: int = 1,
        providers: Sequence[Any] = (),
        session_config: Mapping[str, str] | None = None,
        batch_tensors: Mapping[str, Any] | None = None,
        states: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the file's tensors and largest batch, without a run or graph optimizations."""
        runtime = _onnxruntime()
        _session_settings(runtime, options, session_config or {})  # reports wrong options early
        settings = _session_settings(
            runtime, {"graph_optimization_level": "disable", "intra_op_num_threads": 1}, _NOT_SPINNING
        )
        session = _session(runtime, file, settings, ["CPUExecutionProvider"])
        inputs, outputs = session.get_inputs(), session.get_outputs()
        first = int(has_batch_axis([one.shape for one in inputs], [one.shape for one in outputs]))
        declared = {
            "inputs": [_declared_tensor(one, first, file) for one in inputs],
            "outputs": [_declared_tensor(one, first, file) for one in outputs],
            "max_batch_size": MAX_BATCH_SIZE * first,
        }
        return without_states(declared, states)

    def __call__(self, requests: Any) -> Any:
        """Answer all requests by one run of the session. If the run fails on the CPU, answer each request by
        itself: a text that is no UTF-8, or an index that is out of range, fails no other request.
        """
        answer: Any = self._answer  # its declared type still takes arrays
        if self._batch_tensors is not None:
            answer = partial(self._batch_tensors.run, run=self._run)
        elif self._states is not None:
            answer = partial(self._states.run, run=self._run)
        try:
            return answer(requests)
        except Exception:
            if self._device != "cpu" or (answers := retry_one_by_one(answer, requests)) is None:
                raise
            return answers

    @batch(pad=0)
    def _answer(self, /, **arrays: Any) -> dict[str, Any]:
        return self._run(arrays)

    def _run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if self._is_single:
            arrays = {name: array[None] for name, array in arrays.items()}
        if any(map(_is_on_device, arrays.values())):
            if self._stream is None:
                _synchronize(arrays.values())
            answers = self._on_device.run(arrays)
        else:
            answers = self._run_on_host(arrays)
        if self._is_single:
            answers = [one[0] for one in answers]
        return dict(zip(self._outputs, answers, strict=True))

    def _run_on_host(self, arrays: dict[str, Any]) -> list[Any]:
        feed = {name: np.asarray(array) for name, array in arrays.items()}
        if self._has_strings:
            feed = {
                name: _decoded_strings(one, name) if one.dtype == object else one
                for name, one in feed.items()
            }
        if not self._in_bfloat16:
            answers: list[Any] = self._session.run(list(self._outputs), feed)
            return answers
        values = {name: self._ort_value(array, self._inputs[name]) for name, array in feed.items()}
        return [_host_array(one) for one in self._session.run_with_ort_values(list(self._outputs), values)]

    def _ort_value(self, array: NDArray[Any], datatype: str) -> Any:
        make = self._runtime.OrtValue
        if datatype == BF16:
            return make.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
        return make.ortvalue_from_numpy(array)


accept_batch(OnnxModel.__call__)


class BoundRuns:
    """Runs of a session on arrays in device memory, whose outputs stay there. Not yet run on a GPU.

    All runs with the same shapes share one binding, in which a run replaces only the addresses that changed,
    and the outputs, which else would be written over. ``inputs`` and ``outputs`` are datatypes by name,
    ``place`` is a device as onnxruntime names it, such as ("cuda", 0). With a ``stream`` of CuPy, in which
    the session computes, the host waits for nothing.
    """

    def __init__(
        self,
        runtime: Any,
        session: Any,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        place: tuple[str, int],
        stream: Any = None,
    ) -> None:
        self._session = session
        self._inputs = inputs
        # numpy has no bfloat16, and a device no texts.
        self._outputs = {
            name: ("cpu", 0) if datatype in {BYTES, BF16} else place for name, datatype in outputs.items()
        }
        self._place = place
        self._stream = stream
        self._options = runtime.RunOptions()
        self._is_awaited = stream is None or set(self._outputs.values()) != {place}
        if not self._is_awaited:
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        #: The binding and the bound addresses for each combination of shapes, least recently used first.
        self._bindings: dict[Any, tuple[Any, dict[str, int]]] = {}

    def run(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return the outputs for inputs of which at least one is in device memory."""
        shapes = tuple([(name, *one.shape) for name, one in arrays.items()])
        found = self._bindings.pop(shapes, None) or (self._session.io_binding(), {})
        self._bindings[shapes] = found
        if len(self._bindings) > _MAX_BINDINGS:
            del self._bindings[next(iter(self._bindings))]
        binding, addresses = found
        for name, array in arrays.items():
            address = _device_pointer(array)
            if address is None:
                texts = array.dtype == object
                binding.bind_cpu_input(name, _decoded_strings(array, name) if texts else array)
            elif addresses.get(name) != address:
                datatype = self._inputs[name]
                element = _ONNX_BFLOAT16 if datatype == BF16 else numpy_dtype(datatype).type
                binding.bind_input(name, *self._place, element, tuple(array.shape), address)
                addresses[name] = address
        for name, place in self._outputs.items():
            binding.bind_output(name, *place)
        if self._stream is None:
            self._session.run_with_iobinding(binding, self._options)
        else:
            import cupy

            current = cupy.cuda.get_current_stream()
            self._stream.wait_event(current.record())
            self._session.run_with_iobinding(binding, self._options)
            current.wait_event(self._stream.record())
        if self._is_awaited:
            binding.synchronize_outputs()
        return [
            _DeviceArray(one) if one.device_name() == "cuda" else _host_array(one)
            for one in binding.get_outputs()
        ]


def _onnxruntime() -> Any:
    """Import onnxruntime. Disable its telemetry, which from 1.29 on reports every session to its maker."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads this on import
    return import_library("onnxruntime", "onnx")


def _session(runtime: Any, file: str, settings: Any, providers: Sequence[Any]) -> Any:
    try:
        session = runtime.InferenceSession(existing_file(file), settings, providers=providers)
    except ModelFileError:
        raise
    except Exception as error:  # onnxruntime's own errors have no common class
        reason = str(error).rpartition(" : ")[2].strip()
        raise ModelFileError(
            f"{os.path.basename(file)} is no ONNX model that onnxruntime can load: {reason}"
        ) from None
    first = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if first not in session.get_providers():  # onnxruntime falls back to the CPU and only logs it
        raise ModelFileError(
            f"onnxruntime could not use its {first} for {os.path.basename(file)}: the libraries of CUDA or "
            "cuDNN that it needs are not there, see its message above"
        )
    return session


def _providers(runtime: Any, device: str, given: Sequence[Any], stream: Any) -> list[Any]:
    if given:
        return [one if isinstance(one, str) else (one[0], dict(one[1])) for one in given]
    if device == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        raise ModelFileError(
            f"device {device} needs the build of onnxruntime for CUDA: pip uninstall onnxruntime, then pip "
            "install onnxruntime-gpu"
        )
    options: dict[str, Any] = {"device_id": _device_number(device)}
    if stream is not None:
        options["user_compute_stream"] = str(stream.ptr)
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


def _session_settings(runtime: Any, given: Mapping[str, Any], config: Mapping[str, str]) -> Any:
    settings = runtime.SessionOptions()
    for key, value in config.items():
        settings.add_session_config_entry(key, str(value))
    words = {
        "graph_optimization_level": (runtime.GraphOptimizationLevel, _LEVELS),
        "execution_mode": (runtime.ExecutionMode, _MODES),
    }
    known = [one for one in dir(settings) if not one.startswith("_") and not callable(getattr(settings, one))]
    for name, value in given.items():
        if name not in known:
            raise ModelFileError(
                f"onnxruntime has no session option {name!r}, expected one of {', '.join(known)}"
            )
        if name in words:
            enumeration, values = words[name]
            if value not in values:
                raise ModelFileError(f"{name} must be {' or '.join(map(repr, values))}, got {value!r}")
            value = getattr(enumeration, values[value])
        try:
            setattr(settings, name, value)
        except TypeError:
            kind = type(getattr(settings, name)).__name__
            raise ModelFileError(
                f"the session option {name} must be of type {kind}, got {value!r:.100}"
            ) from None
    return settings


def _device_number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def has_batch_axis(inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]]) -> bool:
    """Return whether all first axes are free, and have the same name if they are named."""
    free = all(shape and not isinstance(shape[0], int) for shape in (*inputs, *outputs))
    names = {shape[0] for shape in inputs if shape and isinstance(shape[0], str)}
    return bool(inputs) and free and len(names) <= 1


def _declared_tensor(one: Any, first: int, file: str) -> dict[str, Any]:
    shape = [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in one.shape]
    return {"name": one.name, "dtype": _datatype_of(one, file), "shape": shape[first:]}


def _datatype_of(one: Any, file: str) -> str:
    """Return the datatype of an input or output. Raise ModelFileError if the protocol has none."""
    element = one.type.removeprefix("tensor(").removesuffix(")")
    if not one.type.startswith("tensor(") or element not in _DATATYPES:
        hint = "; convert it with zipmap=False" if one.type.startswith("seq(map(") else ""
        where = f"{one.name!r} of {os.path.basename(file)}"
        raise ModelFileError(f"{where} is {one.type}, which the protocol has no datatype for{hint}")
    return _DATATYPES[element]


def _wanted_outputs(session: Any, file: str, states: SequenceStates | None) -> dict[str, str]:
    """Return the datatypes of the outputs to compute: those that are declared or carry state, or all."""
    model = served_model()
    names = [] if model is None else [one.name for one in model.outputs]
    declared = None if model is None else set(names if states is None else states.output_names(names))
    found = [one for one in session.get_outputs() if declared is None or one.name in declared]
    missing = (declared or set()) - {one.name for one in found}
    if missing:
        known = ", ".join(one.name for one in session.get_outputs())
        raise ModelFileError(f"{os.path.basename(file)} has no output {sorted(missing)[0]!r}, only {known}")
    return {one.name: _datatype_of(one, file) for one in found}


def _check_states(states: SequenceStates, inputs: Mapping[str, str], file: str) -> None:
    """Raise ModelFileError unless the file has the inputs of the states, with their datatypes."""
    for one in states.tensors:
        if inputs.get(one.input) != one.datatype:
            found = ", ".join(f"{name} {datatype}" for name, datatype in inputs.items())
            raise ModelFileError(
                f"the state needs an input {one.input!r} of {one.datatype}, but {os.path.basename(file)} has "
                f"{found}"
            )


def _decoded_strings(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Return byte strings as str for onnxruntime. Raise ValueError if an element is no UTF-8."""
    try:
        texts = [one.decode() if isinstance(one, bytes) else one for one in array.ravel()]
    except UnicodeDecodeError as error:
        raise ValueError(f"input {name!r} must hold UTF-8, but an element does not: {error.reason}") from None
    found = np.empty(len(texts), object)
    found[:] = texts
    return found.reshape(array.shape)


def _host_array(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    shape = value.shape()
    count = math.prod(shape)
    if not count:
        return np.empty(shape, numpy_dtype(BF16))
    held = (ctypes.c_uint16 * count).from_address(value.data_ptr())
    return np.frombuffer(held, np.uint16).copy().view(numpy_dtype(BF16)).reshape(shape)


def _is_on_device(array: Any) -> bool:
    # Tensors of torch may be anywhere, arrays of CuPy are on a GPU.
    return not isinstance(array, np.ndarray) and bool(getattr(array, "is_cuda", True))


def _device_pointer(array: Any) -> int | None:
    """Return the device address of an array, or None for an array on the host."""
    if not _is_on_device(array):
        return None
    if hasattr(array, "data_ptr"):  # torch, whose bfloat16 has no array interface
        return int(array.data_ptr())
    return int(array.__cuda_array_interface__["data"][0])


def _synchronize(arrays: Any) -> None:
    """Wait until the GPU has computed the inputs, because onnxruntime uses a stream of its own."""
    for array in arrays:
        if hasattr(array, "data_ptr"):
            import torch

            torch.cuda.current_stream(array.device).synchronize()
            return
        if not isinstance(array, np.ndarray):
            import cupy

            cupy.cuda.get_current_stream().synchronize()
            return


class _DeviceArray:
    """An output on the GPU, with the CUDA array interface. The object keeps the memory alive."""

    def __init__(self, value: Any) -> None:
        self._ort_value = value
        element = value.data_type().removeprefix("tensor(").removesuffix(")")
        self.dtype = numpy_dtype(_DATATYPES[element])
        self.shape = tuple(value.shape())
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (value.data_ptr(), False),
            "version": 3,
        }

    def __getitem__(self, index: Any) -> Any:
        import cupy

        return cupy.asarray(self)[index]
