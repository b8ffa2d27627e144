"""The front's side of inference for a door that is a process of its own: its requests are submitted as any
others are, and what becomes of them is told to it. The front touches no byte of a large tensor: the door's
memory is lent to workers, and the workers' to the door.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpuserve.errors import RequestError
from gpuserve.front.links.output_memory import OutputMemory
from gpuserve.front.memory.scatter import Answer, WholeOutputs
from gpuserve.front.models.pending import OnResponse, PendingRequest
from gpuserve.front.observe.tracing.reception import Reception, Receptions
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.service.inference import Inference
from gpuserve.front.v2.types import NOTHING, Data, InferRequest, InferResponse, InputTensor, RegionSlice
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import Sequence as SequencePart


class _SenderHead(NamedTuple):
    headers: messages.Headers


class _SenderEnds(NamedTuple):
    source: str | bytes


class _Sender(NamedTuple):
    """What a fair queue asks of the exchange by which a request came."""

    head: _SenderHead
    ends: _SenderEnds


class DoorRequests:
    """The requests of one door, and what it is lent. ``receptions`` notes those of them that are traced."""

    def __init__(self, passage: Passage, inference: Inference, receptions: Receptions) -> None:
        self._passage = passage
        self._submit = inference.submit
        self._receptions = receptions
        self._memory = OutputMemory()
        self._templates: dict[int, messages.Template] = {}
        self._pending: dict[int, PendingRequest] = {}
        self._leases = itertools.count(1)
        self._leased: dict[int, Callable[[], None]] = {}
        self._loans = itertools.count(1)
        #: Called when the door is gone, by whoever has lent it something.
        self.on_close: list[Callable[[Any], None]] = []
        self._freed: list[tuple[int, int]] = []
        self._is_closed = False
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.Template: self._know,
            messages.Alike: self._infer_alike,
            messages.ForgetTemplates: lambda _: self._templates.clear(),
            messages.Infer: self._infer,
            messages.TakenBack: self._take_back,
            messages.Closed: self._close_leases,
            messages.DropSegment: lambda message: self._memory.detach(message.segment),
        }

    @property
    def n_leased(self) -> int:
        """How many responses the door has not closed yet that need memory, or are of streams."""
        return len(self._leased)

    # ---- from the door --------------------------------------------------------------------

    def _infer(self, message: messages.Infer) -> None:
        ticket = message.ticket
        self._run(ticket, self._request(message), partial(self._respond, ticket) if message.stream else None)

    def _know(self, message: messages.Template) -> None:
        self._templates[message.template] = message

    def _infer_alike(self, message: messages.Alike) -> None:
        known, submit, answer, waiting = 0, self._submit, self._answer, self._pending
        for ticket, template, timeout_s, *parts in message.requests:
            if template != known:  # mostly it is that of the request before
                known = template
                _, model, version, outputs, told = self._templates[template]
            inputs = []
            for (name, datatype, shape), data in zip(told, parts, strict=False):
                inputs.append(
                    InputTensor(name, datatype, shape, data if type(data) is bytes else self._data(data, []))
                )
            request = InferRequest(model, version, "", {}, inputs, outputs, timeout_s)
            request.reader, request.ticket = self, ticket
            try:
                pending = waiting[ticket] = submit(request, None, answer)
            except RequestError as error:
                self._refuse(ticket, error, untried=True)
            else:
                if pending.is_over:  # its answer was there
                    waiting.pop(ticket, None)

    def _run(self, ticket: int, request: InferRequest, on_response: OnResponse | None = None) -> None:
        request.ticket = ticket
        try:
            pending = self._submit(request, on_response, self._answer)
        except RequestError as error:
            self._refuse(ticket, error, untried=True)
            return
        if not pending.is_over:
            self._pending[ticket] = pending

    def _take_back(self, message: messages.TakenBack) -> None:
        for ticket in message.tickets:
            pending = self._pending.pop(ticket, None)
            if pending is not None:
                pending.take_back()

    def _close_leases(self, message: messages.Closed) -> None:
        for lease in message.leases:
            self._leased.pop(lease)()

    def _request(self, message: messages.Infer) -> InferRequest:
        regions: list[RegionSlice] = []
        inputs = [
            InputTensor(name, datatype, shape, data if type(data) is bytes else self._data(data, regions))
            for name, datatype, shape, data in message.inputs
        ]
        placements = NOTHING
        if message.placements:
            placements = {name: self._region(place, regions) for name, place in message.placements}
        request = InferRequest(
            message.model,
            message.version,
            message.id,
            message.parameters,
            inputs,
            message.outputs,
            message.timeout_s,
            message.priority,
            message.empty_final,
            placements,
            NOTHING,
            None if message.sequence is None else SequencePart(*message.sequence),
            tuple(regions),
        )
        if message.client is not None:
            source, headers = message.client
            request.sender = _Sender(_SenderHead(headers), _SenderEnds(source))
        if message.received is not None:
            request.receiver = _Receiver(self._receptions, message)
        return request

    def attach(self, message: messages.Segment, fds: list[int]) -> None:
        """Map a segment of the door's arena; its descriptor stays the caller's."""
        self._memory.attach(message.segment, fds[0], message.nbytes)

    def _data(self, place: tuple[Any, int, int], regions: list[RegionSlice]) -> Data:
        if isinstance(place[0], str):
            return self._region(place, regions)
        segment, offset, nbytes = place
        return self._memory.lent(segment, offset, nbytes, partial(self._free, (segment, offset)))

    def _region(self, place: tuple[str, int, int], regions: list[RegionSlice]) -> RegionSlice:
        regions.append(RegionSlice(*place))
        return regions[-1]

    # ---- to the door ----------------------------------------------------------------------

    def take_batch(self, requests: Sequence[PendingRequest], whole: WholeOutputs) -> None:
        """Tell of the outputs of a batch, for those of its requests that are the door's."""
        tickets, waiting = [], self._pending
        for one in requests:
            request = one.request
            if request.reader is self and one.end_uncut():
                tickets.append(request.ticket)
                del waiting[request.ticket]
            else:  # another door's, or nobody's any more
                tickets.append(0)
        tensors = tuple(
            [
                (name, datatype, shape, payload if type(payload) is bytes else self._loan(whole, payload))
                for name, datatype, shape, payload in whole.tensors
            ]
        )
        lease = 0 if whole.release is None else self._lease(whole.release)
        rows = tuple([one.rows for one in requests])
        self._passage.post(messages.Outputs(tuple(tickets), rows, whole.version, tensors, lease))

    def _loan(self, whole: WholeOutputs, place: wire.Payload) -> tuple[int, int, int]:
        assert isinstance(place, wire.Ref), "it was checked"
        return whole.memory.lend(*place, self)[:3]

    def _lease(self, release: Callable[[], None]) -> int:
        lease = next(self._leases)
        self._leased[lease] = release
        return lease

    def _answer(self, pending: PendingRequest, answer: Answer) -> None:
        ticket = pending.request.ticket
        self._pending.pop(ticket, None)
        if isinstance(answer, InferResponse):
            self._tell(ticket, answer, final=True)
        elif answer is None:
            self._passage.post(messages.Ended(ticket))
        else:
            self._refuse(ticket, answer)
        receiver = pending.request.receiver
        if receiver is not None:
            receiver.close()

    def _respond(self, ticket: int, response: InferResponse) -> None:
        self._tell(ticket, response, final=False)

    def _refuse(self, ticket: int, error: RequestError, *, untried: bool = False) -> None:
        self._passage.post(messages.Refused(ticket, error.code.value, str(error), untried))

    def _tell(self, ticket: int, response: InferResponse, *, final: bool) -> None:
        """Tell of a response, which stays until the door has closed it where that needs its memory."""
        outputs = tuple(
            [(one.name, one.datatype, one.shape, self._payload(response, one)) for one in response.outputs]
        )
        lease = 0
        if response.on_close is not None:
            if final and not any(type(one[3]) is tuple for one in outputs):
                response.close()
            else:
                lease = self._lease(response.close)
        self._passage.post(
            messages.Result(ticket, response.model_version, dict(response.parameters), outputs, lease, final)
        )

    def _payload(self, response: InferResponse, output: Any) -> Any:
        data, memory = output.data, response.memory
        if output.placed:
            return None
        if type(data) is bytes:
            return data
        if memory is not None and len(data) > wire.INLINE_NBYTES:
            place = memory.locate(data)
            if place is not None:
                return place.memory.lend(place.segment, place.offset, len(data), self)[:3]
        return bytes(data)

    def _free(self, place: tuple[int, int]) -> None:
        if self._is_closed:
            return
        if not self._freed:
            self._passage.call_at_end(self._say_freed)
        self._freed.append(place)

    def _say_freed(self) -> None:
        freed, self._freed = self._freed, []
        self._passage.post(messages.Freed(tuple(freed)))

    # ---- as a borrower of workers' memory ---------------------------------------------------

    def next_loan(self) -> int:
        return next(self._loans)

    def send(self, message: wire.Lend | wire.Unlend, fds: Sequence[int] = ()) -> None:
        """Tell the door of a segment of a worker's arena, or that nothing will refer to it any more."""
        if isinstance(message, wire.Lend):
            self._passage.send(messages.Lend(*message), fds)
        else:
            self._passage.post(messages.Unlend(*message))

    def close(self) -> None:
        """The door is gone: what it asked is taken back, and what it was lent goes back."""
        self._is_closed = True
        for pending in list(self._pending.values()):
            pending.take_back()
        self._pending.clear()
        while self._leased:
            self._leased.popitem()[1]()
        for callback in tuple(self.on_close):
            callback(self)
        self._memory.close()


class _Receiver:
    """Makes what notes the network's side of a request, once that is found to be traced."""

    __slots__ = ("_message", "_receptions", "reception")

    def __init__(self, receptions: Receptions, message: messages.Infer) -> None:
        self._receptions = receptions
        self._message = message
        self.reception: Reception | None = None

    def receive(self) -> Reception | None:
        assert self._message.received is not None
        began_ns, is_grpc, headers = self._message.received
        stream = self._message.stream and is_grpc
        self.reception = self._receptions.of(headers, grpc=is_grpc, stream=stream, began_ns=began_ns)
        return self.reception

    def close(self) -> None:
        """The answer is with the door."""
        if self.reception is not None:
            self.reception.sending()
            self.reception.sent()
            self.reception.close()
