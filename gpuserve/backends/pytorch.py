"""PyTorch models without their code: programs of ``torch.export`` (.pt2), whose tensors are in the file, and
TorchScript (.pt), which only names its inputs.

``PytorchModel`` maps the names that clients use to the arguments of the file; ``_ExportedProgram`` and
``_ScriptProgram`` call the file with tensors in that order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.backends.model_files import (
    DATATYPES,
    MAX_BATCH_SIZE,
    ModelFileError,
    existing_file,
    import_library,
    is_one_row_per_request,
    load_once,
    require_trust,
    threads_per_instance,
)
from gpuserve.backends.sequences import SequenceStates, without_states
from gpuserve.decorators import batch
from gpuserve.decorators.wrapping import served_model
from gpuserve_worker.inference.inference_request import accept_batch
from gpuserve_worker.protocol.tensor import as_tensor

_EXPORTED: Final = ".pt2"
#: Names that mean a position: Triton's INPUT__0 and OUTPUT__0.
_BY_POSITION: Final = re.compile(r".*__(\d+)")


class PytorchModel:
    """A model file of PyTorch.

    Args:
        file: Path of the file.
        device: "cpu" or "cuda:0".
        instances: Number of instances that share the processors, which sets the default number of threads.
        num_threads: Threads that an operator may use. 0: by ``instances``.
        trust: Whether a file may run code: every .pt2, and TorchScript that can reach files.
        shared_weights: Whether the instances have one copy of the weights of a .pt2 file.
        states: Arguments of ``SequenceStates``, if the sequences have implicit state.

    Raises:
        ModelFileError: if the file cannot be served, or has other tensors than the model declares.
    """

    def __init__(
        self,
        file: str,
        device: str = "cpu",
        instances: int = 1,
        num_threads: int = 0,
        trust: bool = False,
        shared_weights: bool = False,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        torch = _import_torch(file, trust)
        torch.set_num_threads(num_threads or threads_per_instance(instances))
        self._torch = torch
        self._device = torch.device(device)
        self._loaded = _load_program(torch, file, device, trust, is_shared=shared_weights)
        model = served_model()
        inputs = self._loaded.inputs if model is None else [one.name for one in model.inputs]
        outputs = self._loaded.outputs if model is None else [one.name for one in model.outputs]
        self._states = None
        if states is not None:
            self._states = SequenceStates(**states, place=lambda one: as_tensor(one).to(device, copy=True))
            self.sequence_dropped = self._states.drop
            inputs = [*(one for one in inputs if one not in self._states.inputs), *self._states.inputs]
            outputs = self._states.output_names(outputs)
        self._order = _input_order(inputs, self._loaded.inputs, os.path.basename(file))
        self._outputs = outputs
        self._is_single = is_one_row_per_request(self._loaded.ranks)

    @classmethod
    def declare(
        cls, file: str, trust: bool = False, states: Mapping[str, Any] | None = None, **_options: Any
    ) -> dict[str, Any]:
        """Return an exported program's tensors and batch. Raise ModelFileError for TorchScript."""
        torch = _import_torch(file, trust)
        declared = _load_program(torch, file, "cpu", trust).declaration() | {"array": "torch"}
        return without_states(declared, states)

    def __call__(self, requests: Any) -> Any:
        answer: Any = self._answer  # its declared type still takes tensors
        return answer(requests) if self._states is None else self._states.run(requests, self._run)

    @batch(pad=0)
    def _answer(self, /, **tensors: Any) -> dict[str, Any]:
        return self._run(tensors)

    def _run(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        with self._torch.inference_mode():
            given = [tensors.get(name) for name in self._order]
            while given and given[-1] is None:  # omitted by the request
                given.pop()
            given = [one if one is None else self._to_device(one) for one in given]
            answers = _named_outputs(self._loaded(given), self._outputs)
            return {name: one[0] for name, one in answers.items()} if self._is_single else answers

    def _to_device(self, tensor: Any) -> Any:
        placed = as_tensor(tensor).to(self._device, non_blocking=True)
        return placed[None] if self._is_single else placed


accept_batch(PytorchModel.__call__)


def _input_order(declared: Sequence[str], known: Sequence[str], file: str) -> list[str]:
    """Return the declared inputs in the order of the file's arguments. The order follows the file's own
    names, or else the position in names such as INPUT__0. Raise ModelFileError if the names are neither.
    """
    if set(declared) <= set(known):
        return [name for name in known if name in declared]
    places = {int(found[1]): name for name in declared if (found := _BY_POSITION.fullmatch(name))}
    if sorted(places) == list(range(len(declared))) and len(declared) <= len(known):
        return [places[place] for place in sorted(places)]
    wrong = next(name for name in declared if name not in known)
    raise ModelFileError(
        f"{file} has no input {wrong!r}, expected {' and '.join(map(repr, known))}, or INPUT__0 and so on by "
        "position"
    )


def _named_outputs(answer: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the results by output, from the keys of a mapping or else by position. Raise ValueError."""
    if isinstance(answer, Mapping):
        if missing := [name for name in names if name not in answer]:
            raise ValueError(f"the model gave no output {missing[0]!r}, only {', '.join(map(str, answer))}")
        return {name: answer[name] for name in names}
    given = list(answer) if isinstance(answer, list | tuple) else [answer]
    found = {}
    for position, name in enumerate(names):
        by_name = _BY_POSITION.fullmatch(name)
        place = int(by_name[1]) if by_name else position
        if place >= len(given):
            raise ValueError(f"the model gave {len(given)} outputs, and {name!r} would be number {place + 1}")
        found[name] = given[place]
    return found


def _import_torch(file: str, trust: bool) -> Any:
    """Check file and trust, and return torch. Raise ModelFileError for an untrusted .pt2 file."""
    existing_file(file)
    if file.lower().endswith(_EXPORTED):
        # Not only the pickles in the archive run code: symbolic sizes are evaluated as Python, nodes of the
        # graph name any function that can be reached from torch, and a compiled program is a shared library.
        require_trust(
            file,
            trust,
            "a program of torch.export, and loading one runs whatever code is in it",
            "convert the program to ONNX with torch.onnx.export instead",
        )
    return import_library("torch", "pytorch")


def _load_program(
    torch: Any, file: str, device: str, trust: bool, *, is_shared: bool = False
) -> _ExportedProgram | _ScriptProgram:
    is_exported = file.lower().endswith(_EXPORTED)
    if is_shared and not is_exported:
        raise ModelFileError("shared_weights is for .pt2 files: TorchScript keeps copies of its own")
    try:
        if not is_exported:
            _refuse_file_access(torch, file, trust)
        with _quiet():
            if is_exported:
                return _ExportedProgram(torch, file, device, is_shared=is_shared)
            return _ScriptProgram(torch, file, device)
    except ModelFileError:
        raise
    except Exception as error:  # torch raises whatever its reader meets
        name, reason = os.path.basename(file), str(error).strip().partition("\n")[0].partition(". ")[0]
        expected = (
            "a program that torch.export.save wrote"
            if is_exported
            else "TorchScript; weights alone (torch.save) have no program: write one with torch.export.save"
        )
        raise ModelFileError(f"{name} cannot be loaded ({reason}): expected {expected}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings that torch writes about files that it cannot read or does not like."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _ExportedProgram:
    """A program of ``torch.export``: its ``inputs`` and their ``ranks``, and its ``outputs``."""

    def __init__(self, torch: Any, file: str, device: str, *, is_shared: bool) -> None:
        program = torch.export.load(file)
        if is_shared:
            parts = program.state_dict, program.constants
            tensors = [
                {name: one for name, one in part.items() if isinstance(one, torch.Tensor)} for part in parts
            ]
            shared = load_once(lambda: tensors, file, (), is_shared=True, device=device)
            for part, found in zip(parts, shared, strict=True):
                part.update(found)
        if device != "cpu":
            program = import_library("torch.export.passes", "pytorch").move_to_device_pass(program, device)
        self._torch = torch
        self._file = os.path.basename(file)
        self._in_spec = program.call_spec.in_spec
        spec = self._in_spec
        args, kwargs = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        whole = [*args, *kwargs.values()]
        self._flat = (len(args), list(kwargs)) if whole == list(range(spec.num_leaves)) else None
        self._ranges = program.range_constraints
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        signature = program.graph_signature
        found = [(name, values.get(name)) for name in signature.user_inputs]
        self._values = {name: value for name, value in found if isinstance(value, torch.Tensor)}
        self._constants = [name for name, _ in found if name not in self._values]
        self.inputs = list(self._values)
        self.ranks = {name: len(value.shape) for name, value in self._values.items()}
        answers = [values.get(name) for name in signature.user_outputs]
        out_spec, count = program.call_spec.out_spec, len(answers)
        self.outputs = [f"OUTPUT__{position}" for position in range(count)]
        if out_spec.type is dict and len(out_spec.context) == count:
            self.outputs = [str(one) for one in out_spec.context]
        self._answers = dict(zip(self.outputs, answers, strict=True))
        self._module = program.module()

    def __call__(self, tensors: Sequence[Any]) -> Any:
        if self._flat is not None:  # skips the slower tree
            count, names = self._flat
            return self._module(*tensors[:count], **dict(zip(names, tensors[count:], strict=True)))
        args, kwargs = self._torch.utils._pytree.tree_unflatten(list(tensors), self._in_spec)
        return self._module(*args, **kwargs)

    def declaration(self) -> dict[str, Any]:
        if self._constants:
            raise ModelFileError(
                f"{self._file} has an input {str(self._constants[0])!r} that is no tensor: export it with "
                "that value inside the model"
            )
        size = self._largest_batch()
        first = 1 if size else 0
        return {
            "inputs": [self._declared_tensor(*one, first) for one in self._values.items()],
            "outputs": [self._declared_tensor(*one, first) for one in self._answers.items()],
            "max_batch_size": size,
        }

    def _largest_batch(self) -> int:
        """Return the largest batch, or 0 unless the first axes of all tensors are one free axis."""
        tensors = [*self._values.values(), *self._answers.values()]
        if not self._values or not all(getattr(one, "shape", ()) for one in tensors):
            return 0
        firsts = {str(one.shape[0]) for one in tensors}
        if len(firsts) > 1 or isinstance(tensors[0].shape[0], int):
            return 0
        limits = self._ranges.get(tensors[0].shape[0].node.expr)
        if limits is None or limits.lower > 1:
            return 0 if limits is not None else MAX_BATCH_SIZE
        return int(min(MAX_BATCH_SIZE, limits.upper))

    def _declared_tensor(self, name: str, value: Any, first: int) -> dict[str, Any]:
        word = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        if word not in DATATYPES:
            raise ModelFileError(
                f"{name!r} of {self._file} is {word}, which the protocol has no datatype for"
            )
        shape = [dim if isinstance(dim, int) else -1 for dim in value.shape]
        return {"name": name, "dtype": DATATYPES[word], "shape": shape[first:]}


#: Operators of TorchScript that read or write files, and the function that can name them by a string.
_FILE_OPERATORS: Final = re.compile(rb"\b(?:save|from_file|read_file|write_file|getattr)\b")
#: Classes in C++ that a program can make, but for the packed weights of quantized and prepacked layers.
_NATIVE_CLASSES: Final = re.compile(rb"\btorch\.classes\.(?!quantized\.|mkldnn\.|xnnpack\.)[\w.]+")


def _refuse_file_access(torch: Any, file: str, trust: bool) -> None:
    """Refuse TorchScript that can reach files: its ``__setstate__`` methods run when it is loaded."""
    # The reader of torch.jit.load, so that both see the same records.
    reader = torch._C.PyTorchFileReader(file)
    for record in reader.get_all_records():
        if not record.endswith((".py", ".pkl")):
            continue
        content = reader.get_record(record)
        found = _NATIVE_CLASSES.search(content)
        if found is None and record.endswith(".py"):
            found = _FILE_OPERATORS.search(content)
        if found is not None:
            require_trust(
                file,
                trust,
                f"TorchScript that uses {found[0].decode()!r}, which can read and write files",
                "write the program without that",
            )


class _ScriptProgram:
    """A program of TorchScript, of which only the names of its ``inputs`` are known."""

    def __init__(self, torch: Any, file: str, device: str) -> None:
        self._module = torch.jit.load(file, map_location=device).eval()
        self._file = os.path.basename(file)
        self.inputs = [one.name for one in self._module.forward.schema.arguments][1:]
        self.outputs = ["OUTPUT__0"]
        self.ranks: dict[str, int] = {}

    def __call__(self, tensors: Sequence[Any]) -> Any:
        return self._module(*tensors)

    def declaration(self) -> dict[str, Any]:
        tensors = ", ".join(f"{{name: {one}, dtype: float32, shape: [-1]}}" for one in self.inputs)
        raise ModelFileError(
            f"{self._file} is TorchScript, which has neither datatypes nor shapes: declare them in the "
            f"model's entry, such as inputs: [{tensors}], outputs: [{{name: OUTPUT__0, …}}] "
            "and max_batch_size where it batches, or export the model by torch.export.save to a file .pt2"
        )
