"""A worker's calls to other models on its link: questions out, answers in. Who receives is the loop's
business; how a call is waited for is in ``calling/calls.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve_worker.calling.calls import CallReply, OutgoingCalls
from gpuserve_worker.calling.failure import client_text
from gpuserve_worker.calling.outputs import CheckedOutput, DeviceReader, is_on_device
from gpuserve_worker.calling.questions import CallRequest, ModelCallError, Question
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES, datatype_of, encode_bytes

if TYPE_CHECKING:
    from gpuserve_worker.running.reception import LinkReceiver

_REPLACED: Final = "the server was interrupted while it answered; the call may be made again"
_ENDED: Final = "this instance of the model ends, so no other model can be asked any more"


class LinkPort:
    """The calls of one worker's callable; implements ``CallPort``."""

    def __init__(self, calls: OutgoingCalls, receiver: LinkReceiver) -> None:
        self._calls = calls
        self._receiver = receiver
        self.wait = receiver.wait
        self.look = receiver.look
        self.wakes = receiver.runs_event_loop

    def attached(self) -> None:
        """Fail what was asked before a front took the link over: whoever would have answered is gone."""
        self._calls.fail_all(_REPLACED)
        self._calls.open(self)

    def close(self) -> None:
        self._calls.close(_ENDED)

    def ask(self, call_id: int, question: Question) -> None:
        message: wire.Message
        if isinstance(question, CallRequest):
            message = self._call(call_id, question)
        else:
            verb, model, parameters = question
            message = wire.Command(call_id, verb, model, dict(parameters))
        if not self._receiver.session.send(message):
            raise ModelCallError("UNAVAILABLE", _REPLACED)

    def _call(self, call_id: int, request: CallRequest) -> wire.Call:
        waits = request.blocks and self._receiver.is_own_thread()
        session = self._receiver.session
        reader = None if session.device is None else session.device.reader
        outputs = [_tensor(request.model, name, value, reader) for name, value in request.inputs.items()]
        try:
            inputs = session.writer.tensors(outputs)
        except OutOfMemory:
            text = f"There is no memory for the inputs of a call to model {request.model!r}"
            raise ModelCallError("RESOURCE_EXHAUSTED", text) from None
        return wire.Call(
            call_id,
            request.model,
            request.version,
            inputs,
            request.requested_outputs,
            dict(request.parameters),
            request.timeout_s,
            request.stream,
            waits,
            request.request_id,
            request.sequence,
        )

    def call_off(self, call_id: int) -> None:
        self._receiver.session.send_if_there(wire.CallOff(call_id))

    def give_back(self, lease: int) -> None:
        self._receiver.session.send_if_there(wire.Return((lease,)))

    def take(self, answer: wire.Answer) -> None:
        """Hand an answer to whoever asked. Raises ``ValueError`` where it names memory that there is not."""
        call_id, lease, outputs, parameters, failure, final = answer
        if failure is not None:
            reply = CallReply(None, {}, ModelCallError(*failure), True)
        elif outputs is None:
            reply = CallReply(None, parameters, None, True)
        else:
            arrays, held = self._receiver.session.borrow(lease, outputs)
            reply = CallReply(arrays, parameters, None, final, 0 if held else lease)
        if not self._calls.reply(call_id, reply) and reply.lease:  # nobody waits for it any more
            self.give_back(reply.lease)


def _tensor(model: str, name: Any, value: Any, reader: DeviceReader | None) -> CheckedOutput:
    """An input of a call as it is to be written, brought to the host; ``ModelCallError``: it is no tensor."""
    if not isinstance(name, str):
        text = f"an input of a call to model {model!r} is named {name!r}: names must be str"
        raise ModelCallError("INVALID_ARGUMENT", text)
    try:
        array = _array(value, reader)
        datatype = datatype_of(np.dtype(object) if array.dtype.kind in "SU" else array.dtype)
        if datatype != BYTES:
            return CheckedOutput(name, datatype, array.shape, array.nbytes, array.dtype, [array])
        encoded = encode_bytes(array.ravel().tolist())
    except (TypeError, ValueError, BufferError) as error:
        text = f"input {name!r} of a call to model {model!r}: {client_text(error)}"
        raise ModelCallError("INVALID_ARGUMENT", text) from None
    return CheckedOutput(name, BYTES, array.shape, len(encoded), np.dtype(object), [encoded])


def _array(value: Any, reader: DeviceReader | None) -> Any:
    if reader is None or type(value) is np.ndarray or not is_on_device(value):
        return np.asarray(value)
    array = reader.read(value)
    return reader.as_dtype(array, array.dtype)
