"""The front's side of inference for a door that is a process of its own: its requests are submitted as any
others are, and what becomes of them is told to it. The front touches no byte of a large tensor: the door's
memory is lent to workers, and the workers' to the door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpuserve.core.errors import RequestError, inner_code
from gpuserve.front.memory.scatter import Answer, WholeOutputs
from gpuserve.front.models.pending import OnResponse, PendingRequest
from gpuserve.front.observability.tracing.request_trace import Reception, Receptions
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.loans import DoorLoans
from gpuserve.front.requests.inference import NOTHING, InferRequest, InferResponse, InputTensor, RegionSlice
from gpuserve.front.service.inference_service import Inference
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
        self._templates: dict[int, messages.RequestTemplate] = {}
        self._pending: dict[int, PendingRequest] = {}
        self.loans = DoorLoans(passage)
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.RequestTemplate: self._know,
            messages.Alike: self._infer_alike,
            messages.ForgetTemplates: lambda _: self._templates.clear(),
            messages.Infer: self._infer,
            messages.TakenBack: self._take_back,
            **self.loans.obey,
        }

    # ---- from the door --------------------------------------------------------------------

    def _infer(self, message: messages.Infer) -> None:
        ticket = message.ticket
        self._run(ticket, self._request(message), partial(self._respond, ticket) if message.stream else None)

    def _know(self, message: messages.RequestTemplate) -> None:
        self._templates[message.template] = message

    def _infer_alike(self, message: messages.Alike) -> None:
        known, submit, answer, waiting = 0, self._submit, self._answer, self._pending
        for ticket, template, timeout_s, *parts in message.requests:
            if template != known:  # mostly it is that of the request before
                known = template
                _, model, version, outputs, told = self._templates[template]
            inputs = []
            for (name, datatype, shape), data in zip(told, parts, strict=False):
                if type(data) is bytes:
                    inputs.append(InputTensor(name, datatype, shape, data))
                else:
                    inputs.append(self._placed(name, datatype, shape, data, []))
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

    def _request(self, message: messages.Infer) -> InferRequest:
        regions: list[RegionSlice] = []
        inputs = [
            InputTensor(name, datatype, shape, data)
            if type(data) is bytes
            else self._placed(name, datatype, shape, data, regions)
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

    def _placed(
        self,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        place: tuple[Any, ...],
        regions: list[RegionSlice],
    ) -> InputTensor:
        at, offset, nbytes, *problem = place
        if isinstance(at, str):
            return InputTensor(name, datatype, shape, self._region((at, offset, nbytes), regions))
        return InputTensor(name, datatype, shape, self.loans.input_at(at, offset, nbytes), *problem)

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
                (
                    name,
                    datatype,
                    shape,
                    payload if type(payload) is bytes else self.loans.place(whole.memory, payload),
                )
                for name, datatype, shape, payload in whole.tensors
            ]
        )
        lease = 0 if whole.release is None else self.loans.lease(whole.release)
        rows = tuple([one.rows for one in requests])
        self._passage.post(messages.Outputs(tuple(tickets), rows, whole.version, tensors, lease))

    def _answer(self, pending: PendingRequest, answer: Answer) -> None:
        ticket = pending.request.ticket
        self._pending.pop(ticket, None)
        if isinstance(answer, InferResponse):
            self._tell(ticket, answer, final=True)
        elif answer is None:
            self._passage.post(messages.StreamEnded(ticket))
        else:
            self._refuse(ticket, answer)
        receiver = pending.request.receiver
        if receiver is not None:
            receiver.close()

    def _respond(self, ticket: int, response: InferResponse) -> None:
        self._tell(ticket, response, final=False)

    def _refuse(self, ticket: int, error: RequestError, *, untried: bool = False) -> None:
        self._passage.post(messages.RefusedRequest(ticket, inner_code(error), str(error), untried))

    def _tell(self, ticket: int, response: InferResponse, *, final: bool) -> None:
        """Tell of a response, which stays until the door has closed it where that needs its memory."""
        outputs = tuple(
            [(one.name, one.datatype, one.shape, self.loans.told(response, one)) for one in response.outputs]
        )
        lease = 0
        if response.on_close is not None:
            if final and not any(type(one[3]) is tuple for one in outputs):
                response.close()
            else:
                lease = self.loans.lease(response.close)
        self._passage.post(
            messages.Result(ticket, response.model_version, dict(response.parameters), outputs, lease, final)
        )

    def close(self) -> None:
        """The door is gone: what it asked is taken back, and what it was lent goes back."""
        for pending in list(self._pending.values()):
            pending.take_back()
        self._pending.clear()
        self.loans.close()


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
