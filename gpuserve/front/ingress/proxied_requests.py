"""The front's side of one ingress process: its forwarded requests, its inference requests, and its models.

Inference requests of an ingress process are submitted like any others. The front touches no byte of a large
tensor: memory of the ingress process is lent to workers, and workers' memory to the ingress process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from gpuserve.core.errors import RequestError, inner_code, request_error
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.forwarded import ForwardedExchanges
from gpuserve.front.ingress.ingress_memory import IngressLoans
from gpuserve.front.ingress.ipc_channel import IpcChannel
from gpuserve.front.ingress.model_replica import ModelPublisher
from gpuserve.front.ipc.scatter import Answer, WholeOutputs
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.exchange import RequestHandler
from gpuserve.front.observability.tracing.request_trace import Reception, Receptions
from gpuserve.front.requests.inference import NOTHING, InferRequest, InferResponse, InputTensor, RegionSlice
from gpuserve.front.service.control import TraceControl
from gpuserve.front.service.inference_service import Inference, InferenceService
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import Sequence as SequencePart


class IngressSession:
    """The front's side of one ingress process. ``accept`` answers forwarded requests."""

    def __init__(self, service: InferenceService, accept: RequestHandler, channel: IpcChannel) -> None:
        trace = service.control.trace
        self._exchanges = ForwardedExchanges(channel, accept)
        self._requests = ProxiedRequests(channel, service.inference, trace)
        self._publisher = ModelPublisher(channel, service.models, service.health, trace)
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            **self._exchanges.handlers,
            **self._requests.handlers,
        }

    def open(self) -> None:
        """Start publishing models, once the ingress process has its settings."""
        self._publisher.open()

    def attach(self, message: wire.Segment, fds: list[int]) -> None:
        """Map a segment of the arena of the ingress process. The caller keeps its descriptor."""
        self._requests.loans.attach(message, fds)

    def close(self) -> None:
        """Abort and cancel all its requests, because the ingress process is gone."""
        self._publisher.close()
        self._exchanges.close()
        self._requests.close()


class ProxiedRequests:
    """The inference requests of one ingress process, and the memory lent to it."""

    def __init__(self, channel: IpcChannel, inference: Inference, trace: TraceControl) -> None:
        self._channel = channel
        self._submit = inference.submit
        self._trace = trace
        self._templates: dict[int, messages.RequestTemplate] = {}
        self._pending: dict[int, PendingRequest] = {}
        self.loans = IngressLoans(channel)
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            messages.RequestTemplate: lambda message: self._templates.update({message.template: message}),
            messages.TemplatedRequests: self._submit_templated,
            messages.ForgetTemplates: lambda _: self._templates.clear(),
            messages.SubmitRequest: self._submit_request,
            messages.CancelRequests: self._cancel_requests,
            messages.UnreadRequest: self._trace_unread,
            **self.loans.handlers,
        }

    # ---- from the ingress process --------------------------------------------------------------------

    def _submit_request(self, message: messages.SubmitRequest) -> None:
        ticket = message.ticket
        request = self._request(message)
        request.ticket = ticket
        on_response = partial(self._send_result, ticket, final=False) if message.stream else None
        try:
            pending = self._submit(request, on_response, self._answer)
        except RequestError as error:
            self._send_failure(ticket, error, untried=True)
            if request.receiver is not None:
                request.receiver.close()
            return
        if not pending.is_over:
            self._pending[ticket] = pending

    def _submit_templated(self, message: messages.TemplatedRequests) -> None:
        current, submit, answer, waiting = 0, self._submit, self._answer, self._pending
        for ticket, template, timeout_s, *parts in message.requests:
            if template != current:  # consecutive requests mostly share a template
                current = template
                _, model, version, outputs, described = self._templates[template]
            inputs = []
            for (name, datatype, shape), data in zip(described, parts, strict=False):
                if type(data) is bytes:
                    inputs.append(InputTensor(name, datatype, shape, data))
                else:
                    inputs.append(self._input_at(name, datatype, shape, data, []))
            request = InferRequest(model, version, "", {}, inputs, outputs, timeout_s)
            request.reader, request.ticket = self, ticket
            try:
                pending = waiting[ticket] = submit(request, None, answer)
            except RequestError as error:
                self._send_failure(ticket, error, untried=True)
            else:
                if pending.is_over:  # answered already
                    waiting.pop(ticket, None)

    def _cancel_requests(self, message: messages.CancelRequests) -> None:
        for ticket in message.tickets:
            pending = self._pending.pop(ticket, None)
            if pending is not None:
                pending.cancel()

    def _trace_unread(self, message: messages.UnreadRequest) -> None:
        name, code, text, began_ns, is_grpc, headers = message
        reception = self._trace.receptions.of(headers, grpc=is_grpc, began_ns=began_ns)
        if reception is not None:
            self._trace.on_unread(name, request_error(code, text), None, reception)
            reception.sending()
            reception.sent()
            reception.close()

    def _request(self, message: messages.SubmitRequest) -> InferRequest:
        regions: list[RegionSlice] = []
        inputs = [
            InputTensor(name, datatype, shape, data)
            if type(data) is bytes
            else self._input_at(name, datatype, shape, data, regions)
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
            source, headers = message.client  # the part of an exchange that fair queues use
            endpoints, head = SimpleNamespace(source=source), SimpleNamespace(headers=headers)
            request.sender = SimpleNamespace(endpoints=endpoints, head=head)
        if message.received is not None:
            request.receiver = _Receiver(self._trace.receptions, message)
        return request

    def _input_at(
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

    # ---- to the ingress process ----------------------------------------------------------------------

    def receive_batch(self, requests: Sequence[PendingRequest], whole: WholeOutputs) -> None:
        """Send the outputs of a batch for the requests of this ingress process."""
        tickets, waiting = [], self._pending
        for one in requests:
            request = one.request
            if request.reader is self and one.mark_answered():
                tickets.append(request.ticket)
                del waiting[request.ticket]
            else:  # another process's request, or a cancelled one
                tickets.append(0)
        place, memory = self.loans.place, whole.memory
        tensors = tuple(
            [
                (*described, payload if type(payload) is bytes else place(memory, payload))
                for *described, payload in whole.tensors
            ]
        )
        lease = 0 if whole.release is None else self.loans.lease(whole.release)
        rows = tuple([one.rows for one in requests])
        self._channel.post(messages.BatchOutputs(tuple(tickets), rows, whole.version, tensors, lease))

    def _answer(self, pending: PendingRequest, answer: Answer) -> None:
        ticket = pending.request.ticket
        self._pending.pop(ticket, None)
        if isinstance(answer, InferResponse):
            self._send_result(ticket, answer, final=True)
        elif answer is None:
            self._channel.post(messages.StreamEnded(ticket))
        else:
            self._send_failure(ticket, answer)
        receiver = pending.request.receiver
        if receiver is not None:
            receiver.close()

    def _send_failure(self, ticket: int, error: RequestError, *, untried: bool = False) -> None:
        self._channel.post(messages.FailedRequest(ticket, inner_code(error), str(error), untried))

    def _send_result(self, ticket: int, response: InferResponse, *, final: bool) -> None:
        """Send a response. It stays open until the ingress process closes it if it uses shared memory."""
        describe = self.loans.describe
        outputs = tuple(
            [(one.name, one.datatype, one.shape, describe(response, one)) for one in response.outputs]
        )
        lease = 0
        if response.on_close is not None:
            if final and not any(type(one[3]) is tuple for one in outputs):
                response.close()
            else:
                lease = self.loans.lease(response.close)
        version, parameters = response.model_version, dict(response.parameters)
        self._channel.post(messages.RequestResult(ticket, version, parameters, outputs, lease, final))

    def close(self) -> None:
        """Cancel all requests and return lent memory, because the ingress process is gone."""
        for pending in list(self._pending.values()):
            pending.cancel()
        self._pending.clear()
        self.loans.close()


class _Receiver:
    """Creates the network timing of a request, once the request is found to be traced."""

    __slots__ = ("_message", "_receptions", "reception")

    def __init__(self, receptions: Receptions, message: messages.SubmitRequest) -> None:
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
        """Record that the answer was sent to the ingress process."""
        if self.reception is not None:
            self.reception.sending()
            self.reception.sent()
            self.reception.close()
