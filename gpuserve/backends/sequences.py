"""Iterative sequences and implicit state, as the config.pbtxt of a model declares them.

Implicit state are tensors that a model file returns for a request of a sequence, and receives with the next
request of that sequence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuserve.backends.model_files import ModelFileError
from gpuserve.decorators.batch_data import concatenated, grouped, join_requests, rows_of
from gpuserve.decorators.wrapping import served_model
from gpuserve_worker.inference.inference_request import Batch, BatchedOutputs
from gpuserve_worker.protocol.payloads import Sequence as RequestSequence
from gpuserve_worker.protocol.tensor import BYTES, decode_bytes, numpy_dtype


def iterative_slots(config: Mapping[str, Any]) -> int:
    """Return the number of active requests of an instance, or 0 unless a ``ModelConfig`` is iterative."""
    sequences = config.get("sequence_batching") or {}
    if not sequences.get("iterative_sequence"):
        return 0
    rows = max(1, int(config.get("max_batch_size", 0)))
    return int((sequences.get("oldest") or {}).get("max_candidate_sequences", 0)) or rows


def states_in(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments of ``SequenceStates`` in a ``ModelConfig`` as plain data; {} if there is no state.
    Files of initial states are in a subfolder of the model's ``folder``.
    """
    sequences = config.get("sequence_batching") or {}
    tensors = []
    for one in sequences.get("state", ()):
        initial = (list(one.get("initial_state", ())) or [{}])[0]
        dims = [max(1, int(dim)) for dim in initial.get("dims") or one.get("dims", ())]
        file = initial.get("data_file", "")
        path = os.path.join(os.path.abspath(folder), "initial_state", file) if file else ""
        datatype = one["data_type"].removeprefix("TYPE_").replace("STRING", BYTES)
        in_place = bool(one.get("use_same_buffer_for_input_output"))
        tensors.append([one["input_name"], one["output_name"], datatype, dims, path, in_place])
    controls = [one["name"] for one in sequences.get("control_input", ())]
    return {"tensors": tensors, "controls": controls} if tensors else {}


def without_states(declared: dict[str, Any], states: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a declaration without the tensors of ``SequenceStates``, which clients neither send nor get."""
    own = {name for one in states["tensors"] for name in one[:2]} | set(states["controls"]) if states else ()
    tensors = {key: [one for one in declared[key] if one["name"] not in own] for key in ("inputs", "outputs")}
    return declared | tensors


class StateTensor(NamedTuple):
    """A tensor of state. ``shape`` is that of the initial state, which is in the file ``path``, or zero. If
    ``in_place``, a new state of the same shape is written into the memory of the old one.
    """

    input: str
    output: str
    datatype: str
    shape: Sequence[int]
    path: str = ""
    in_place: bool = False

    def initial(self) -> Any:
        """Return the initial state; raise ModelFileError if the file has too few bytes or cannot be read."""
        count = math.prod(self.shape)
        if not self.path:
            filling: Any = b"" if self.datatype == BYTES else 0
            return np.full(self.shape, filling, numpy_dtype(self.datatype))
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise ModelFileError(
                f"the initial state {self.path!r} cannot be read: {error.strerror}"
            ) from None
        try:
            if self.datatype == BYTES:
                found = np.empty(count, object)
                found[:] = decode_bytes(content, count)
            else:
                found = np.frombuffer(content, numpy_dtype(self.datatype), count).copy()
        except ValueError:
            raise ModelFileError(
                f"the initial state {self.path!r} must have {count} elements of {self.datatype}, but it has "
                f"{len(content)} bytes"
            ) from None
        return found.reshape(self.shape)


#: The states of a sequence by the name of the input.
_States = dict[str, Any]


class SequenceStates:
    """The implicit state of the sequences at one instance, by the fields of each ``StateTensor`` and the
    names of the control inputs. ``place`` returns a copy of an array of the runtime or of numpy, where the
    runtime takes it.
    """

    def __init__(
        self, tensors: Sequence[Sequence[Any]], controls: Sequence[str], place: Callable[[Any], Any]
    ) -> None:
        model = served_model()
        rows = (1,) if model is None or model.batching else ()
        self.tensors = [StateTensor(*one) for one in tensors]
        self.inputs = [*controls, *(one.input for one in self.tensors)]
        self._place = place
        self._initial = {one.input: one.initial() for one in self.tensors}
        self._initial = {name: place(one.reshape(*rows, *one.shape)) for name, one in self._initial.items()}
        self._states: dict[int | str, _States] = {}

    def output_names(self, declared: Sequence[str]) -> list[str]:
        """Return the outputs to compute: the declared ones, and those that only carry state."""
        return [*declared, *(one.output for one in self.tensors if one.output not in declared)]

    def drop(self, sequence_id: int | str) -> None:
        """Delete the state of a sequence that ended without its last request."""
        self._states.pop(sequence_id, None)

    def run(self, requests: Any, run: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Any:
        """Return the outputs of the requests, and keep their new states if all runs succeed. Requests whose
        states differ in shape run one after the other. ``run`` maps arrays by input name to outputs by name.
        """
        batch = requests if isinstance(requests, Batch) else join_requests(requests, "state")
        if isinstance(requests, Batch):
            given = [one[4] if len(one) > 4 else None for one in batch.requests]
            sequences = [one and RequestSequence(*one) for one in given]
        else:
            sequences = [getattr(one, "sequence", None) for one in requests]
        before = [
            self._initial if one is None or one.start else self._states.get(one.id, self._initial)
            for one in sequences
        ]
        groups = grouped(tuple([tuple(state.shape) for state in one.values()]) for one in before)
        found = [(group, self._run_group(batch, before, group, run)) for group in groups]
        for group, outputs in found:
            for row, position in enumerate(group):
                rows = slice(row, row + 1) if batch.batching else slice(None)
                self._keep(sequences[position], outputs, rows)
        answers = [
            (group, {name: one for name, one in outputs.items() if name in batch.output_names})
            for group, outputs in found
        ]
        if len(answers) == 1:
            return BatchedOutputs(answers[0][1], batch.rows)
        each: list[Any] = [None] * len(sequences)
        for group, outputs in answers:
            for row, position in enumerate(group):
                each[position] = {name: one[row : row + 1] for name, one in outputs.items()}
        return each

    def _run_group(
        self,
        batch: Batch,
        before: Sequence[_States],
        group: Sequence[int],
        run: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> Mapping[str, Any]:
        arrays = dict(batch.arrays)
        if len(group) < len(before):
            arrays = {name: rows_of(one, group) for name, one in arrays.items()}
        for name in self._initial:
            states = [before[position][name] for position in group]
            arrays[name] = states[0] if len(states) == 1 else concatenated(states)
        return run(arrays)

    def _keep(self, sequence: RequestSequence | None, outputs: Mapping[str, Any], rows: slice) -> None:
        if sequence is None:
            return
        if sequence.end:
            self.drop(sequence.id)
            return
        states = self._states.setdefault(sequence.id, {})
        for one in self.tensors:
            state, held = outputs[one.output][rows], states.get(one.input)
            if one.in_place and held is not None and held.shape == state.shape:
                held[...] = state
            else:
                states[one.input] = self._place(state)
