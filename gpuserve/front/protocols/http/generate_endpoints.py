"""``/generate`` and ``/generate_stream``: inference with JSON objects, the second with server-sent events.

Both serve any model; a stream has as many responses as the model gives. In a request, a key named like an
input is that input, shaped to fit the model; all others but ``id`` are parameters.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

from gpuserve.core.errors import Internal, InvalidArgument, RequestError
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.protocols.access.endpoints import Route
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.protocols.http import async_inference as inference
from gpuserve.front.protocols.http.async_inference import PendingResponses, closing_trace
from gpuserve.front.protocols.http.http_responses import error_body, json_answer
from gpuserve.front.requests import json_values
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.json_values import compact, described, tensor_bytes
from gpuserve.front.requests.limits import (
    MAX_PARAMETERS,
    check_count,
    check_parameter_name,
    check_texts,
    shown,
    suggested,
)
from gpuserve.front.requests.parameters import SEQUENCE_KEYS, json_sequence
from gpuserve.front.requests.server_status import STATUS
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec, element_count


class GenerateEndpoints:
    """``/generate`` and ``/generate_stream``, for requests of at most ``max_request_nbytes``."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
    ) -> None:
        self._service = service
        self._reader = inference.RequestReader(service, max_request_nbytes, forwarding)

    async def generate(self, route: Route, client: AsyncRequest) -> None:
        """Send the only response, as JSON. Raise RequestError, also if there is not exactly one response."""
        bodies: list[bytes | memoryview] = []
        executor = self._service.json_executor
        request = await self._read(route, client)
        with closing_trace(request), closing(PendingResponses(self._service, request)) as responses:
            while len(bodies) < 2 and (response := await responses.next(client)) is not None:
                bodies.append(await inference.rendered(response, response_json, executor))
            if len(bodies) != 1:
                raise Internal(ONE_RESPONSE)
            with inference.timing_send(request):
                json_answer(bytes(bodies[0])).send(client.exchange)

    async def stream(self, route: Route, client: AsyncRequest) -> None:
        """Send each response as an event, and errors too, but raise those before the model ran."""
        exchange = client.exchange
        request = await self._read(route, client)
        with closing_trace(request):
            with closing(PendingResponses(self._service, request)) as responses:
                executor = self._service.json_executor
                failure = await inference.send_events(client, request, responses, response_json, executor)
            if failure is not None and failure.untried:  # refused before the model ran
                try:
                    raise failure
                finally:
                    del failure  # its traceback refers to this frame
            with inference.timing_send(request):
                inference.start_events(exchange, 200 if failure is None else STATUS[failure.code][0])
                if failure is not None:
                    exchange.send(inference.sse_event(error_body(str(failure))))
                exchange.finish()

    async def _read(self, route: Route, client: AsyncRequest) -> InferRequest:
        def parse(parts: list[bytes]) -> InferRequest:
            return parse_generate_request(b"".join(parts), spec, route.model_version)

        async def unchanged(request: InferRequest) -> InferRequest:
            return request

        try:
            spec = self._service.models.find(route.model_name, route.model_version).spec
            return await self._reader.read(client, parse, unchanged)
        except RequestError as error:
            inference.trace_unread(self._service, route.model_name, error, client.exchange)
            raise


# ---- bodies --------------------------------------------------------------------------------------

ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)
_NESTED: Final = "parameters"
_SCALARS: Final = (bool, int, float, str)


def parse_generate_request(body: bytes, spec: ModelSpec, version: str) -> InferRequest:
    """Return the request in a JSON object. Raise InvalidArgument or ResourceExhausted for unfit members."""
    try:
        document = json_values.loads(body)
    except json_values.DuplicateKey as error:
        raise _duplicate_input(error.key, spec) or error from None
    if not isinstance(document, dict):
        raise InvalidArgument("a generate request must be a JSON object of inputs and parameters")
    members = _flat_members(document, spec)
    inputs = [
        _input(tensor, members.pop(tensor.name), spec) for tensor in spec.inputs if tensor.name in members
    ]
    request_id = members.pop("id", "")
    if not isinstance(request_id, str):
        raise InvalidArgument(f"'id': expected a string, got {described(request_id)}")
    check_count("parameters", len(members), MAX_PARAMETERS, spec.name)
    sequence = json_sequence(members)
    for key in SEQUENCE_KEYS:
        members.pop(key, None)
    parameters = {key: _parameter(key, value, spec) for key, value in members.items()}
    check_texts(request_id, parameters)
    return InferRequest(spec.name, version, request_id, parameters, inputs, (), None, sequence=sequence)


def response_json(response: InferResponse) -> bytes:
    """Return a response as a JSON object. Raise InvalidArgument if an output has no JSON form."""
    members = [
        f'"model_name":{compact(response.model_name)}',
        f'"model_version":{compact(response.model_version)}',
    ]
    if response.id:
        members.append(f'"id":{compact(response.id)}')
    members += [f"{compact(key)}:{compact(value)}" for key, value in response.parameters.items()]
    for output in response.outputs:
        pieces = json_values.tensor_json(output.data, output.datatype, output.shape, output.name)
        text = b"".join(pieces).decode()
        if element_count(output.shape) == 1:
            text = text[1:-1]
        members.append(f"{compact(output.name)}:{text}")
    return f"{{{','.join(members)}}}".encode()


def _flat_members(document: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the members together with those of ``parameters``, unless an input has that name."""
    if _NESTED not in document or any(tensor.name == _NESTED for tensor in spec.inputs):
        return dict(document)
    members = dict(document)
    nested = members.pop(_NESTED)
    if not isinstance(nested, dict):
        raise InvalidArgument(f"'{_NESTED}': expected an object, got {described(nested)}")
    for key, value in nested.items():
        if key in members:
            twice = InvalidArgument(f"'{shown(key)}' is given twice, at the top and in '{_NESTED}'")
            raise _duplicate_input(key, spec) or twice
        members[key] = value
    return members


def _duplicate_input(key: str, spec: ModelSpec) -> InvalidArgument | None:
    """Return the error for an input that is given twice, or None if the key is not an input."""
    if not any(tensor.name == key for tensor in spec.inputs):
        return None
    return InvalidArgument(f"input '{shown(key)}' already exists in request for model '{spec.name}'")


def _input(tensor: TensorSpec, value: Any, spec: ModelSpec) -> InputTensor:
    data = value if isinstance(value, list) else [value]
    if tensor.schema:  # an object in the place of its JSON text
        data = [compact(one) if isinstance(one, dict) else one for one in data]
    count = _count(data)
    shape = _shape(tensor, data, count, spec)
    content = tensor_bytes(data, tensor.datatype, count, tensor.name)
    return InputTensor(tensor.name, tensor.datatype, shape, content)


def _count(data: list[Any]) -> int:
    return sum(_count(one) if isinstance(one, list) else 1 for one in data)


def _shape(tensor: TensorSpec, data: list[Any], count: int, spec: ModelSpec) -> tuple[int, ...]:
    declared = (-1, *tensor.shape) if spec.max_batch_size else tensor.shape
    fixed = element_count([dim for dim in declared if dim != -1])
    innermost = max((axis for axis, dim in enumerate(declared) if dim == -1), default=None)
    rest = count // fixed if fixed else 0
    if rest * fixed != count or (innermost is None and rest != 1):
        text = len(data) == 1 and isinstance(data[0], str | dict) and shown(str(data[0]))
        raise InvalidArgument(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape: expected "
            f"{tensor.datatype} of the shape {list(declared)}, given {count} "
            f"{'value' if count == 1 else 'values'}{f', {text!r}' if text else ''}"
        )
    return tuple(dim if dim != -1 else rest if axis == innermost else 1 for axis, dim in enumerate(declared))


def _parameter(key: str, value: Any, spec: ModelSpec) -> Any:
    check_parameter_name(key, spec.name)
    if isinstance(value, _SCALARS):
        return value
    raise InvalidArgument(
        f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', or 'string'. "
        f"It is no input of model '{spec.name}'{suggested(key, [one.name for one in spec.inputs]) or '.'}"
    )
