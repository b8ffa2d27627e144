"""A worker's calls to other models on its link: questions out, answers in. Who receives is the loop's
business.

How a call is waited for is in ``calls.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve_worker import wire
from gpuserve_worker.calls import Calls, ModelCallError, Question, Reply
from gpuserve_worker.failure import client_text
from gpuserve_worker.memory import OutOfMemory
from gpuserve_worker.outputs import Output, is_on_device
from gpuserve_worker.session import Session
from gpuserve_worker.tensor import BYTES, datatype_of, encode_bytes

if TYPE_CHECKING:
    from gpuserve_worker.cuda.device_arrays import DeviceArrays

_REPLACED: Final = "the server was interrupted while it answered; the call may be made again"
_ENDED: Final = "this instance of the model ends, so no other model can be asked any more"


class LinkPort:
    """The calls of one worker's callable. ``session`` gives the front that is there now."""

    def __init__(
        self,
        calls: Calls,
        session: Callable[[], Session],
        wait: Callable[[Callable[[], bool]], None],
        is_own_thread: Callable[[], bool],
        *,
        on_event_loop: bool = False,
    ) -> None:
        self._calls = calls
        self._session = session
        self._wait = wait
        self._is_own_thread = is_own_thread
        self._on_event_loop = on_event_loop

    def attached(self) -> None:
        """A front has taken the link over. Whoever would have answered what was asked before is gone."""
        self._calls.fail_all(_REPLACED)
        self._calls.open(self)

    def close(self) -> None:
        """There is no front any more."""
        self._calls.close(_ENDED)

    def ask(self, call_id: int, question: Question) -> None:
        """Send a question; see ``CallPort``."""
        waits = question.blocks and self._is_own_thread()
        session = self._session()
        arrays = None if session.device is None else session.device.arrays
        outputs = [_tensor(question.model, name, value, arrays) for name, value in question.inputs.items()]
        try:
            inputs = session.writer.tensors(outputs)
        except OutOfMemory:
            text = f"There is no memory for the inputs of a call to model {question.model!r}"
            raise ModelCallError("RESOURCE_EXHAUSTED", text) from None
        call = wire.Call(
            call_id,
            question.model,
            question.version,
            inputs,
            question.requested_outputs,
            dict(question.parameters),
            question.timeout_s,
            question.stream,
            waits,
        )
        if not session.send(call):
            raise ModelCallError("UNAVAILABLE", _REPLACED)

    def call_off(self, call_id: int) -> None:
        """Nobody waits for the answer any more."""
        self._session().send_if_there(wire.CallOff(call_id))

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let messages come in until something is true."""
        self._wait(ready)

    def wakes(self) -> bool:
        """Whether this thread runs the event loop that messages come in on."""
        return self._on_event_loop and self._is_own_thread()

    def give_back(self, lease: int) -> None:
        """A reply without memory of its own was taken."""
        self._session().send_if_there(wire.Return((lease,)))

    def take(self, answer: wire.Answer) -> None:
        """An answer has come.

        Raises:
            ValueError: it names memory that there is not.
        """
        call_id, lease, outputs, parameters, failure, final = answer
        session = self._session()
        if failure is not None:
            reply = Reply(None, {}, ModelCallError(*failure), True)
        elif outputs is None:
            reply = Reply(None, parameters, None, True)
        else:
            arrays, held = session.borrow(lease, outputs)
            reply = Reply(arrays, parameters, None, final, 0 if held else lease)
        if not self._calls.reply(call_id, reply) and reply.lease:  # nobody waits for it any more
            self.give_back(reply.lease)


def _tensor(model: str, name: Any, value: Any, device_arrays: DeviceArrays | None) -> Output:
    """An input of a call as it is to be written, which brings it to the host.

    Raises:
        ModelCallError: it is no tensor.
    """
    if not isinstance(name, str):
        text = f"an input of a call to model {model!r} is named {name!r}: names must be str"
        raise ModelCallError("INVALID_ARGUMENT", text)
    try:
        array = _array(value, device_arrays)
        datatype = datatype_of(np.dtype(object) if array.dtype.kind in "SU" else array.dtype)
        if datatype != BYTES:
            return Output(name, datatype, array.shape, array.nbytes, array.dtype, [array])
        encoded = encode_bytes(array.ravel().tolist())
    except (TypeError, ValueError, BufferError) as error:
        text = f"input {name!r} of a call to model {model!r}: {client_text(error)}"
        raise ModelCallError("INVALID_ARGUMENT", text) from None
    return Output(name, BYTES, array.shape, len(encoded), np.dtype(object), [encoded])


def _array(value: Any, device_arrays: DeviceArrays | None) -> Any:
    if device_arrays is None or type(value) is np.ndarray or not is_on_device(value):
        return np.asarray(value)
    array = device_arrays.read(value)
    return device_arrays.as_dtype(array, array.dtype)
