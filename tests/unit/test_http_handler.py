"""The HTTP handler on a connection: the body receiver and the outcome of a request."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any, Final

import pytest
from driver_scene import SPEC
from handler_scene import LIMIT_NBYTES, ServiceScene
from http1_talk import Talk, post

from gpuserve.front.protocols.access import body_decoding as offload
from gpuserve.front.protocols.access.authorization import AccessPolicy
from gpuserve.front.protocols.access.endpoints import Endpoint
from gpuserve.front.protocols.http.http_handler import HttpHandler
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

INFER: Final = b"POST /v2/models/m/infer HTTP/1.1"
BODY: Final = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}'
WIDE: Final = 1 << 17


class House(ServiceScene):
    """An HTTP handler with the model "m"."""

    def __init__(self, spec: ModelSpec = SPEC, policy: AccessPolicy | None = None) -> None:
        super().__init__(spec)
        self.handler = HttpHandler(self.service, self.requests, LIMIT_NBYTES, policy or AccessPolicy())

    def talk(self, client: tuple[str, int] = ("127.0.0.1", 5)) -> Talk:
        return Talk(handler=self.handler.accept, client=client)

    async def __aenter__(self) -> House:
        return self


def get(path: bytes, fields: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (path, fields)


def outputs(talk: Talk) -> list[Any]:
    """The outputs in every answer so far."""
    return [json.loads(body)["outputs"] for _, body in talk.responses()]


# ---- inference ----------------------------------------------------------------------------------


async def test_an_answer_is_sent_in_the_turn_in_which_it_is_there() -> None:
    async with House() as house:
        talk = house.talk().feed(post(BODY, line=INFER))
        assert house.requests.tasks == set()
        assert talk.way.sent == b""
        await house.answer()
        assert outputs(talk) == [[{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}]]
        talk.feed(post(BODY, line=INFER, fields=b"Content-Encoding: identity\r\n"))
        await house.answer(well=False)
        assert talk.responses()[1][0].startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("cuts", [(), (150,), tuple(range(0, 400, 7))])
@pytest.mark.parametrize("thread_nbytes", [1, 16 << 10])
async def test_compression(
    cuts: tuple[int, ...], thread_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "THREAD_NBYTES", thread_nbytes)
    async with House() as house:
        fields = b"Content-Encoding: gzip\r\nAccept-Encoding: gzip\r\n"
        talk = house.talk().feed(post(gzip.compress(BODY), fields, INFER), cuts)
        while not talk.way.sent:
            await house.answer()
            await asyncio.to_thread(lambda: None)
        head, _, body = talk.way.sent.partition(b"\r\n\r\n")
        assert b"content-encoding: gzip" in head
        assert b"vary: accept-encoding" in head
        assert json.loads(gzip.decompress(body))["model_name"] == "m"


async def test_a_client_that_leaves_while_a_thread_works_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "THREAD_NBYTES", 1)
    may_go_on, working = threading.Event(), threading.Event()
    result_or_error = offload.result_or_error

    def slowly(work: Any) -> Any:
        working.set()
        may_go_on.wait()
        return result_or_error(work)

    monkeypatch.setattr(offload, "result_or_error", slowly)
    async with House() as house:
        leaves = house.talk().feed(post(gzip.compress(BODY), b"Content-Encoding: gzip\r\n", INFER))
        await asyncio.to_thread(working.wait)
        leaves.http1.lost()
        waits = house.talk().feed(post(BODY, b"Accept-Encoding: deflate\r\n", INFER))
        await house.answer()
        waits.http1.lost()
        may_go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        await house.answer()
        assert (leaves.way.sent, waits.way.sent) == (b"", b"")
        assert house.scene.metrics.outcomes.cancellations == 0


async def test_a_large_tensor_that_comes_in_parts_is_in_the_arena_while_it_is_wanted() -> None:
    wide = ModelSpec("m", (TensorSpec("x", "UINT8", (WIDE,)),), (), 0, SPEC.instances)
    entry = {"name": "x", "shape": [WIDE], "datatype": "UINT8", "parameters": {"binary_data_size": WIDE}}
    text = json.dumps({"inputs": [entry]}).encode()
    fields = b"Inference-Header-Content-Length: %d\r\n" % len(text)
    whole = post(text + bytes(WIDE), fields, INFER)
    async with House(wide) as house:
        for cut in (len(whole) - 1, len(whole)):
            talk = house.talk().feed(whole[:cut], cuts=(len(whole) // 2,))
            await house.scene.settle()
            assert talk.way.sent == b""
            assert house.scene.driver.arena.statistics().block_nbytes >= WIDE
            talk.http1.lost()
            await house.answer()
            assert house.scene.driver.arena.statistics().block_nbytes == 0


# ---- other endpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (post(b"{}", line=b"POST /v2/models/a%2fb/infer HTTP/1.1"), 404, "for unknown model: 'a/b' is"),
        (post(b"", line=b"POST /v2/repository/r/index HTTP/1.1"), 501, "'repository_name' specification"),
        (post(b" " * (1 << 21), line=b"POST /v2/logging HTTP/1.1"), 400, "over the limit of 1048576 bytes"),
    ],
)
async def test_errors(sent: bytes, status: int, text: str) -> None:
    async with House() as house:
        talk = house.talk().feed(sent)
        await house.scene.settle()
        assert talk.status == status
        assert text in talk.error


async def test_what_needs_no_body_is_answered_before_it_has_come() -> None:
    async with House() as house:
        for line in (b"GET /v2/health/live HTTP/1.1", b"POST /v2/models/none/infer HTTP/1.1"):
            talk = house.talk().feed(post(b"1234567890", line=line)[:-10])
            assert talk.way.sent == b""
            await asyncio.sleep(0)
            assert talk.status in (200, 404)
            n_sent = len(talk.way.sent)
            talk.feed(b"1234567890" + get(b"/v2"))
            assert b'{"name":"test"' in talk.way.sent[n_sent:]


async def test_endpoints_that_only_tell_need_no_task() -> None:
    async with House() as house:
        paths = (b"/v2", b"/v2/health/live", b"/v2/models/m", b"/v2/models/m/config", b"/docs",
                 b"/v2/gpus", b"/v2/trace/setting", b"/v2/logging",
                 b"/v2/systemsharedmemory/status")  # fmt: skip
        for path in paths:
            assert house.talk().feed(get(path)).status == 200, path
        assert house.requests.tasks == set()


async def test_what_is_told_of_all_models_is_made_beside_other_requests() -> None:
    async with House() as house:
        for path in (b"/v2/models/stats", b"/openapi.json", b"/metrics"):
            talk = house.talk().feed(get(path))
            assert talk.way.sent == b""
            await house.scene.settle()
            assert talk.status == 200


async def test_a_defect_is_an_answer_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with House() as house:

        def fail(*_: Any) -> Any:
            raise ValueError("a mistake")

        house.handler._immediate[Endpoint.LOGGING] = fail
        house.handler._awaiting[Endpoint.LOGGING_UPDATE] = fail
        talk = house.talk().feed(get(b"/v2/logging"))
        talk.feed(post(b"{}", line=b"POST /v2/logging HTTP/1.1"))
        await house.scene.settle()
        talk.feed(get(b"/v2"))
        assert [head[:12] for head, _ in talk.responses()] == [b"HTTP/1.1 500"] * 2 + [b"HTTP/1.1 200"]
        assert talk.responses()[0][1] == b'{"error":"internal error of the server"}'
    assert caplog.text.count("defect while serving /v2/logging") == 2
