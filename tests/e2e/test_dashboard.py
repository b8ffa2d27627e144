"""The live page of a running server, over sockets: who gets it, and what it is told."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from config_file import model, tensor, write_config
from exploring import variants
from operated import Client
from serving import GPUSERVE, Addresses, serving

TIMEOUT_S = 15.0
BROWSER = {"accept": "text/html,application/xhtml+xml", "user-agent": "Mozilla/5.0"}
ELSEWHERE = {"x-forwarded-for": "203.0.113.9"}
TOLD = ("/dashboard/live", "/dashboard/history", "/dashboard/config")
TOKEN = "of-the-page"


def serve(folder: Any, **settings: Any) -> Any:
    entries = [model("m", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4)]
    return serving(GPUSERVE, "serve", str(write_config(folder, entries, **settings)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server as it is by default."""
    with serve(tmp_path_factory.mktemp("page")) as addresses:
        yield addresses


def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        body = b"" if answer.headers.get_content_type() == "text/event-stream" else answer.read()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, body.decode()


class Watched:
    """The stream of a page that is open."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        self.connection.request("GET", "/dashboard/live", headers=dict(headers or {}))
        self.answer = self.connection.getresponse()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.answer.close()

    def next(self, kind: str) -> Any:
        """The next document of a kind; None after the end."""
        while line := self.answer.readline():
            if line == f"event: {kind}\n".encode():
                return json.loads(self.answer.readline().removeprefix(b"data: "))
        return None


def test_a_browser_gets_the_page_and_everybody_else_links(server: Addresses) -> None:
    status, headers, body = get(server.http, "/", BROWSER)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'none'; ")
    assert "<main" in body
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        status, headers, body = get(server.http, "/", accept)
        assert (status, headers["content-type"], headers["vary"]) == (200, "application/json", "accept")
        told = json.loads(body)
        assert told["message"] == "gpuserve serves models here; the live page is at / for browsers"
        for path in told["links"].values():
            assert get(server.http, path)[0] != 404, path


def test_every_port_says_what_it_has(server: Addresses) -> None:
    status, _, body = get(server.metrics, "/")
    assert (status, json.loads(body)["links"]["metrics"]) == (200, "/metrics")
    assert get(server.metrics, "/dashboard/live")[0] == 404


def test_a_client_of_another_machine_gets_links_and_a_sentence(server: Addresses) -> None:
    status, headers, body = get(server.http, "/", {**BROWSER, **ELSEWHERE})
    assert (status, headers["content-type"]) == (200, "application/json")
    assert "without a proxy between (dashboard: local)" in json.loads(body)["message"]
    for path in TOLD:
        status, _, body = get(server.http, path, ELSEWHERE)
        assert (status, "dashboard: on, or a token" in body) == (403, True), path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example", "user-agent": "Mozilla/5.0"}, 421),  # DNS rebinding
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),  # an image, which has no origin
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://localhost:8000"}, 200),
    ],
)
def test_the_page_of_a_stranger_is_told_nothing(
    server: Addresses, headers: Mapping[str, str], status: int
) -> None:
    for path in TOLD:
        assert get(server.http, path, headers)[0] == status, path


def test_a_page_sees_everything_and_then_what_changes(server: Addresses) -> None:
    with Watched(server.http) as page:
        assert page.answer.headers["content-type"].startswith("text/event-stream")
        kinds = [one["kind"] for one in page.next("events")]
        assert "model_loaded" in kinds
        (row,) = page.next("sample")["models"]
        assert (row["name"], row["state"], row["instances"][0]["state"]) == ("m", "READY", "READY")
        with Client(server.http) as client:
            for _ in range(5):
                assert client.infer("m", 1.0).status == 200
        changed = page.next("sample")
        while not changed["models"]:
            changed = page.next("sample")
        assert changed["models"][0]["requests_per_s"] > 0
        assert changed["models"][0]["p99_s"] > 0
        assert changed["server"]["requests_per_s"] == changed["models"][0]["requests_per_s"]


def test_the_history_is_of_models_that_there_are(server: Addresses) -> None:
    for path in ("/dashboard/history", "/dashboard/history/m/1"):
        status, headers, body = get(server.http, path)
        assert (status, headers["cache-control"]) == (200, "no-store")
        history = json.loads(body)
        assert {len(one) for one in history["series"].values()} == {len(history["times"])}
    status, _, body = get(server.http, "/dashboard/history/none/1")
    assert (status, json.loads(body)["error"]) == (404, "there is no history of model 'none' version 1")
    assert get(server.http, "/dashboard/none.js")[0] == 404


@pytest.mark.thorough
def test_too_many_pages_are_refused_and_one_that_goes_makes_room(server: Addresses) -> None:
    with contextlib.ExitStack() as pages:
        first = pages.enter_context(Watched(server.http))
        for _ in range(63):
            assert pages.enter_context(Watched(server.http)).answer.status == 200
        status, headers, body = get(server.http, "/dashboard/live")
        assert (status, "64 pages watch" in body, headers["retry-after"]) == (503, True, "1")
        first.__exit__()
        while get(server.http, "/dashboard/live")[0] != 200:  # the server hears of it soon
            pass


@pytest.mark.thorough
@pytest.mark.parametrize("ingress", variants(1, 2))
def test_open_pages_do_not_keep_the_server_from_ending(tmp_path: Any, ingress: int) -> None:
    with contextlib.ExitStack() as pages:
        with serve(tmp_path, ingress_processes=ingress) as addresses:  # which ends with 0 on SIGINT
            watched = [pages.enter_context(Watched(addresses.http)) for _ in range(3)]
            for page in watched:
                assert page.next("sample")["server"]["ready"] is True
        for page in watched:
            while page.next("sample") is not None:
                pass


@pytest.mark.thorough
def test_a_page_shows_all_ingress_processes_through_any_of_them(tmp_path: Any) -> None:
    with serve(tmp_path, ingress_processes=2) as addresses, Watched(addresses.http) as page:
        sample = page.next("sample")
        assert [one["number"] for one in sample["doors"]] == [0, 1]
        os.kill(sample["doors"][0]["pid"], 0)
        assert get(addresses.http, "/", BROWSER)[1]["content-type"] == "text/html; charset=utf-8"
        assert get(addresses.http, "/dashboard/live", ELSEWHERE)[0] == 403


@pytest.mark.thorough
def test_a_token_opens_the_page_from_anywhere_and_the_page_itself_needs_none(tmp_path: Any) -> None:
    rules = [{"groups": ["dashboard"], "token": TOKEN}]
    with serve(tmp_path, access_rules=rules) as addresses:
        status, headers, _ = get(addresses.http, "/", {**BROWSER, **ELSEWHERE})
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        shown = {"authorization": f"Bearer {TOKEN}", **ELSEWHERE}
        for path in TOLD:
            assert get(addresses.http, path)[0] == 403
            assert get(addresses.http, path, shown)[0] == 200
        assert TOKEN not in get(addresses.http, "/dashboard/config", shown)[2]


@pytest.mark.thorough
def test_the_page_is_for_anybody_or_nobody_where_the_settings_say_so(tmp_path: Any) -> None:
    with serve(tmp_path, dashboard="on", allowed_hosts=["*"]) as addresses:
        assert get(addresses.http, "/dashboard/config", ELSEWHERE)[0] == 200
    with serve(tmp_path, dashboard="off") as addresses:
        status, headers, body = get(addresses.http, "/", BROWSER)
        assert (status, headers["content-type"]) == (200, "application/json")
        assert "switched off (dashboard: off)" in json.loads(body)["message"]
        for path in (*TOLD, "/dashboard/page.js"):
            assert get(addresses.http, path)[0] == 404
    with serve(tmp_path, allowed_hosts=["*"]) as addresses:  # which lets a stranger's page ask for the rest
        stranger = {"host": "evil.example", "user-agent": "Mozilla/5.0"}
        assert get(addresses.http, "/v2", stranger)[0] == 200
        for path in TOLD:
            assert get(addresses.http, path, stranger)[0] == 403


@pytest.mark.thorough
def test_a_dead_instance_is_told_with_the_reason(tmp_path: Any) -> None:
    with serve(tmp_path) as addresses, Watched(addresses.http) as page:
        (row,) = page.next("sample")["models"]
        os.kill(row["instances"][0]["pid"], signal.SIGKILL)
        told = page.next("events")
        while "instance_died" not in {one["kind"] for one in told}:
            told = page.next("events")
        (death,) = [one for one in told if one["kind"] == "instance_died"]
        assert (death["model"], "9" in death["reason"] or "KILL" in death["reason"]) == ("m", True)
        restarts = 0
        while not restarts:
            for one in page.next("sample")["models"]:
                restarts = one["instances"][0]["restarts"]
