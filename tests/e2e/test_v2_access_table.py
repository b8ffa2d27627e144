"""Every HTTP route and every gRPC method: without a token, with a wrong and the right
one, and asked for by a client of another machine. A route or method without a row here fails the first tests.
"""

from __future__ import annotations

import queue
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import model, tensor, write_config
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serving import GPUSERVE, Addresses, answered, serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from gpuserve.config.settings.values import ADMIN, DASHBOARD, ENDPOINT_GROUPS
from gpuserve.front.protocols.access import endpoints as routes
from gpuserve.front.protocols.access.endpoints import METHODS, Access, AccessKind, Endpoint, Route

TIMEOUT_S = 15.0
TOKEN, OTHER = "of-the-rule", "of-inference"
BEARER = ", or 'authorization: Bearer' with the token"
HEADER, GRPC_HEADER = "triton-access-token", "triton-grpc-protocol-triton-access-token"
GRPC_REFUSED = ("UNAVAILABLE", f"This protocol is restricted, expecting header '{GRPC_HEADER}'{BEARER}")
SERVICE = "/inference.GRPCInferenceService"
#: A mark that a proxy leaves makes a client on this machine one of another.
ELSEWHERE = {"x-forwarded-for": "203.0.113.9"}
PATHS: Mapping[Endpoint, str] = {
    Endpoint.SERVER_METADATA: "/v2",
    Endpoint.MODELS: "/v2/models",
    Endpoint.SERVER_LIVE: "/v2/health/live",
    Endpoint.SERVER_READY: "/v2/health/ready",
    Endpoint.SERVER_STARTED: "/v2/health/startup",
    Endpoint.MODEL_METADATA: "/v2/models/m",
    Endpoint.MODEL_READY: "/v2/models/m/ready",
    Endpoint.MODEL_CONFIG: "/v2/models/m/config",
    Endpoint.MODEL_INFER: "/v2/models/m/infer",
    Endpoint.MODEL_GENERATE: "/v2/models/m/generate",
    Endpoint.MODEL_GENERATE_STREAM: "/v2/models/m/generate_stream",
    Endpoint.MODEL_STATISTICS: "/v2/models/m/stats",
    Endpoint.REPOSITORY_INDEX: "/v2/repository/index",
    Endpoint.REPOSITORY_LOAD: "/v2/repository/models/m/load",
    Endpoint.REPOSITORY_UNLOAD: "/v2/repository/models/m/unload",
    Endpoint.REPOSITORY_NAMED: "/v2/repository/other/index",
    Endpoint.SYSTEM_REGION_STATUS: "/v2/systemsharedmemory/status",
    Endpoint.SYSTEM_REGION_REGISTER: "/v2/systemsharedmemory/region/r/register",
    Endpoint.SYSTEM_REGION_UNREGISTER: "/v2/systemsharedmemory/unregister",
    Endpoint.CUDA_REGION_STATUS: "/v2/cudasharedmemory/status",
    Endpoint.CUDA_REGION_REGISTER: "/v2/cudasharedmemory/region/r/register",
    Endpoint.CUDA_REGION_UNREGISTER: "/v2/cudasharedmemory/unregister",
    Endpoint.TRACE_SETTING: "/v2/trace/setting",
    Endpoint.TRACE_UPDATE: "/v2/trace/setting",
    Endpoint.LOGGING: "/v2/logging",
    Endpoint.LOGGING_UPDATE: "/v2/logging",
    Endpoint.GPUS: "/v2/gpus",
    Endpoint.METRICS: "/metrics",
    Endpoint.OPENAPI: "/openapi.json",
    Endpoint.DOCS: "/docs",
    Endpoint.ROOT: "/",
    Endpoint.DASHBOARD_FILE: "/dashboard/page.js",
    Endpoint.DASHBOARD_LIVE: "/dashboard/live",
    Endpoint.DASHBOARD_HISTORY: "/dashboard/history",
    Endpoint.DASHBOARD_CONFIG: "/dashboard/config",
    Endpoint.ADMIN_STATUS: "/v2/admin/status",
    Endpoint.ADMIN_DRAIN: "/v2/admin/drain",
    Endpoint.ADMIN_RELOAD: "/v2/admin/reload",
    Endpoint.ADMIN_MODEL_LOAD: "/v2/admin/models/m/load",
    Endpoint.ADMIN_MODEL_UNLOAD: "/v2/admin/models/none/unload",
    Endpoint.ADMIN_MODEL_RELOAD: "/v2/admin/models/none/reload",
    Endpoint.ADMIN_MODEL_SCALE: "/v2/admin/models/none/scale",
    Endpoint.OPENAI_MODELS: "/v1/models",
    Endpoint.OPENAI_MODEL: "/v1/models/none",
    Endpoint.OPENAI_COMPLETIONS: "/v1/completions",
    Endpoint.OPENAI_CHAT: "/v1/chat/completions",
    Endpoint.OPENAI_EMBEDDINGS: "/v1/embeddings",
}
#: Messages that change something, of methods that may also read.
CHANGE = {
    "TraceSetting": pb.TraceSettingRequest(
        settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["7"])}
    ),
    "LogSettings": pb.LogSettingsRequest(
        settings={"log_info": pb.LogSettingsRequest.SettingValue(bool_param=True)}
    ),
}


def serve(folder: Any, **settings: Any) -> Any:
    entries = [model("m", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4)]
    config = write_config(folder, entries, host="0.0.0.0", admin_api=True, **settings)
    return serving(GPUSERVE, "serve", str(config))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server whose every group needs a token; inference takes another one as well."""
    rules = [{"groups": list(ENDPOINT_GROUPS), "token": TOKEN}, {"groups": ["inference"], "token": OTHER}]
    with serve(tmp_path_factory.mktemp("closed"), access_rules=rules) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server as it is by default."""
    with serve(tmp_path_factory.mktemp("plain")) as addresses:
        yield addresses


def http_status(address: str, endpoint: Endpoint, headers: Mapping[str, str]) -> tuple[int, str]:
    body = b"{}" if endpoint.method == "POST" else None
    url = f"http://{address}{PATHS[endpoint]}"
    request = urllib.request.Request(url, body, dict(headers), method=endpoint.method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            # What is never over is not read to its end.
            return answer.status, answer.read(-1 if endpoint is not Endpoint.DASHBOARD_LIVE else 1).decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def grpc_status(address: str, path: str, message: bytes, headers: Mapping[str, str]) -> tuple[str, str]:
    """The status of a call of any kind: the first answer is as good as the last."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(iter([message]), metadata=[*headers.items()], timeout=TIMEOUT_S)
        try:
            for _ in call:
                call.cancel()
                return "OK", ""
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def control_message(path: str) -> bytes:
    message: Any = CHANGE.get(path.rpartition("/")[2])
    return b"" if message is None else message.SerializeToString()


# ---- nothing is left out ------------------------------------------------------------------------


def test_every_endpoint_is_asked_for() -> None:
    assert set(PATHS) == set(Endpoint)
    for endpoint, path in PATHS.items():
        route = routes.match_route(endpoint.method, path.encode(), {ADMIN, DASHBOARD})
        assert isinstance(route, Route)
        assert route.endpoint is endpoint


def test_every_method_that_the_server_tells_of_is_in_the_table(plain: Addresses) -> None:
    with grpc.insecure_channel(plain.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        told = set()
        for service in database.get_services():
            file = database.FindFileContainingSymbol(service)
            package = f"{file.package}." if file.package else ""
            told |= {
                f"/{package}{one.name}/{method.name}"
                for one in file.service
                if f"{package}{one.name}" == service
                for method in one.method
            }
    assert told == set(METHODS)


# ---- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", Endpoint, ids=lambda one: one.name)
def test_every_endpoint_needs_the_token(closed: Addresses, endpoint: Endpoint) -> None:
    if endpoint.access.kind is AccessKind.BARE:
        assert http_status(closed.http, endpoint, {})[0] == 200
        return
    expected = (403, f'{{"error":"This API is restricted, expecting header \'{HEADER}\'{BEARER}"}}')
    wrong = [{}, {HEADER: "wrong"}, {HEADER: TOKEN[:-1]}, {HEADER: "x" * 20_000}, {GRPC_HEADER: TOKEN}]
    wrong += [{"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}]
    if endpoint.access.group != "inference":
        wrong.append({HEADER: OTHER})
    of_openai = PATHS[endpoint].startswith("/v1/")  # which has a form of its own
    for headers in wrong:
        status, text = http_status(closed.http, endpoint, headers)
        assert (status == 401 and "invalid_api_key" in text) if of_openai else (status, text) == expected, (
            headers
        )
    for headers in ({HEADER: TOKEN}, {"authorization": f"Bearer {TOKEN}", **ELSEWHERE}):
        assert http_status(closed.http, endpoint, headers)[0] not in {401, 403}, headers


@pytest.mark.parametrize("path", METHODS)
def test_every_method_needs_the_token(closed: Addresses, path: str) -> None:
    wrong = [{}, {GRPC_HEADER: "wrong"}, {HEADER: TOKEN.upper()}, {"authorization": f"Bearer {TOKEN}x"}]
    if METHODS[path].group != "inference":
        wrong.append({GRPC_HEADER: OTHER})
    for address in (closed.grpc, closed.http):  # which speaks both protocols
        for headers in wrong:
            assert grpc_status(address, path, b"", headers) == GRPC_REFUSED, headers
        for headers in ({GRPC_HEADER: TOKEN}, {HEADER: TOKEN}, {"authorization": f"bearer {TOKEN}"}):
            assert grpc_status(address, path, b"", headers) != GRPC_REFUSED, headers


def test_either_token_of_a_group_opens_it(closed: Addresses) -> None:
    for token in (TOKEN, OTHER):
        assert http_status(closed.http, Endpoint.MODEL_INFER, {HEADER: token})[0] == 400
        _, text = grpc_status(closed.grpc, f"{SERVICE}/ModelInfer", b"", {HEADER: token})
        assert "is restricted" not in text


def test_what_there_is_not_is_told_as_ever(closed: Addresses) -> None:
    assert [answered(closed.http, *asked)[0] for asked in (("GET", "/v2/nope"), ("POST", "/v2"))] == [
        404,
        405,
    ]


@pytest.mark.parametrize("path", ["/v2/models/nope", "/v2/models/%6d/versions/1"])
def test_other_paths_of_an_endpoint_need_the_token(closed: Addresses, path: str) -> None:
    assert answered(closed.http, "GET", path)[0] == 403
    assert answered(closed.http, "GET", path, **{HEADER: TOKEN})[0] != 403


def test_a_large_request_is_refused_and_the_connection_goes_on(closed: Addresses) -> None:
    big = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(3 << 20)])
    with grpc.insecure_channel(closed.grpc) as channel:
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as error:
                call(big.SerializeToString(), timeout=TIMEOUT_S)
            assert (error.value.code().name, error.value.details()) == GRPC_REFUSED
    assert answered(closed.http, "POST", "/v2/models/m/infer", bytes(3 << 20))[0] == 403


@pytest.mark.parametrize("end", [True, False])
def test_a_stream_is_refused_whether_or_not_its_requests_end(closed: Addresses, end: bool) -> None:
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    requests.put(pb.ModelInferRequest(model_name="m").SerializeToString())
    if end:
        requests.put(None)
    with grpc.insecure_channel(closed.grpc) as channel:
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as error:
            next(call(iter(requests.get, None), timeout=TIMEOUT_S))
        assert (error.value.code().name, error.value.details()) == GRPC_REFUSED
        requests.put(None)


@pytest.mark.parametrize(("protocol", "header"), [("http", HEADER), ("grpc", GRPC_HEADER)])
def test_inference_with_the_token(closed: Addresses, protocol: str, header: str) -> None:
    kind: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    x = kind.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    with kind.InferenceServerClient(getattr(closed, protocol)) as client:
        assert client.infer("m", [x], headers={header: TOKEN}).as_numpy("y").tolist() == [[1.0]]
        with pytest.raises(InferenceServerException, match="is restricted, expecting header"):
            client.infer("m", [x])


def test_the_metrics_port_needs_none(closed: Addresses) -> None:
    status, _, body = answered(closed.metrics, "GET", "/metrics")
    assert (status, b"gpuserve_build_info" in body) == (200, True)


@pytest.mark.parametrize(
    "path",
    [
        *(f"{SERVICE}/{name}" for name in ("Nope", "modelInfer", "RepositoryModelSave")),
        "/grpc.health.v1.Health/List",
        "/a/b",
    ],
)
def test_a_method_that_is_not_listed(closed: Addresses, plain: Addresses, path: str) -> None:
    for address in (closed.grpc, closed.http, plain.grpc):
        assert grpc_status(address, path, b"", {HEADER: TOKEN})[0] == "UNIMPLEMENTED"


# ---- clients of other machines ------------------------------------------------------------------


def is_remote_refusal(text: str, access: Access) -> bool:
    return f"This '{access.group}' operation is only for clients on the server's own machine" in text


@pytest.mark.parametrize("endpoint", Endpoint, ids=lambda one: one.name)
def test_control_over_http_is_for_clients_of_this_machine(plain: Addresses, endpoint: Endpoint) -> None:
    access = endpoint.access
    for headers in (ELSEWHERE, {"origin": "https://example.com"}):
        status, text = http_status(plain.http, endpoint, headers)
        expected = access.kind not in {AccessKind.USE, AccessKind.BARE}
        assert (status == 403, is_remote_refusal(text, access)) == (expected, expected), headers
    assert http_status(plain.http, endpoint, {"origin": f"http://{plain.http}"})[0] != 403
    status, text = http_status(
        plain.http, endpoint, {"origin": "http://localhost:1"}
    )  # a page of another port
    expected = access.kind in {AccessKind.CONTROL, AccessKind.EITHER}
    assert (status == 403, "not for pages of another server" in text) == (expected, expected)


@pytest.mark.parametrize("path", METHODS)
def test_control_over_grpc_is_for_clients_of_this_machine(plain: Addresses, path: str) -> None:
    access, message = METHODS[path], control_message(path)
    for address in (plain.grpc, plain.http):
        status, text = grpc_status(address, path, message, ELSEWHERE)
        expected = access.kind is not AccessKind.USE
        assert (status == "PERMISSION_DENIED", is_remote_refusal(text, access)) == (expected, expected)
        assert grpc_status(address, path, message, {})[0] != "PERMISSION_DENIED"
        if access.kind is AccessKind.EITHER:  # who asks may read
            assert grpc_status(address, path, b"", ELSEWHERE)[0] == "OK"


def test_the_address_of_the_connection_counts(plain: Addresses, own_address: str) -> None:
    def there(address: str) -> str:
        return f"{own_address}:{address.rpartition(':')[2]}"

    path = f"{SERVICE}/RepositoryModelUnload"
    status, text = http_status(there(plain.http), Endpoint.REPOSITORY_UNLOAD, {})
    assert (status, is_remote_refusal(text, METHODS[path])) == (403, True)
    assert grpc_status(there(plain.grpc), path, b"", {})[0] == "PERMISSION_DENIED"
    assert http_status(there(plain.http), Endpoint.LOGGING, {})[0] == 200
    for endpoint in (Endpoint.ADMIN_STATUS, Endpoint.ADMIN_DRAIN, Endpoint.ADMIN_MODEL_SCALE):
        status, text = http_status(there(plain.http), endpoint, {})
        assert (status, is_remote_refusal(text, endpoint.access)) == (403, True)


@pytest.mark.thorough
def test_remote_control_and_nothing_else_is_opened(tmp_path: Any) -> None:
    with serve(tmp_path, remote_control=["logging"]) as addresses:
        assert http_status(addresses.http, Endpoint.LOGGING_UPDATE, ELSEWHERE)[0] == 200
        message = control_message("/LogSettings")
        assert grpc_status(addresses.grpc, f"{SERVICE}/LogSettings", message, ELSEWHERE)[0] == "OK"
        assert http_status(addresses.http, Endpoint.TRACE_UPDATE, ELSEWHERE)[0] == 403
        assert http_status(addresses.http, Endpoint.ADMIN_STATUS, ELSEWHERE)[0] == 403


@pytest.mark.thorough
def test_the_admin_api_is_opened_by_its_own_token_or_word(tmp_path: Any) -> None:
    rule = {"groups": ["admin"], "token": TOKEN}
    with serve(tmp_path, access_rules=[rule]) as addresses:
        assert http_status(addresses.http, Endpoint.ADMIN_STATUS, {})[0] == 403  # from here, too
        shown = {"authorization": f"Bearer {TOKEN}", **ELSEWHERE}
        assert http_status(addresses.http, Endpoint.ADMIN_STATUS, shown)[0] == 200
    with serve(tmp_path, remote_control=["admin"]) as addresses:
        assert http_status(addresses.http, Endpoint.ADMIN_STATUS, ELSEWHERE)[0] == 200
        assert http_status(addresses.http, Endpoint.ADMIN_MODEL_LOAD, ELSEWHERE)[0] == 200
        assert http_status(addresses.http, Endpoint.LOGGING_UPDATE, ELSEWHERE)[0] == 403


@pytest.fixture
def own_address() -> str:
    """An address of this machine that is not the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells the address that would be used
        except OSError:
            pytest.skip("this machine has no address but the loopback")
        return str(probe.getsockname()[0])
