"""Inference-Header-Content-Length, binary sizes, and how a body is sent: section 1.5, HI-1 to HI-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, HttpStep, case, post
from triton_differences.tensors import In, Inference, http_json

_PATH = "/v2/models/echo_FP32/infer"
_TWO = bytes(8)
_GOOD = Inference("echo_FP32", [In("x", "FP32", [1, 2], [1, 2])])


def _head(nbytes: int, *shape: int) -> bytes:
    entry: dict[str, Any] = {"name": "x", "shape": shape or [1, 2], "datatype": "FP32"}
    return json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": nbytes}}]}).encode()


def _binary(head: bytes, tail: bytes, length: str | None = None) -> HttpStep:
    told = str(len(head)) if length is None else length
    return post(_PATH, head + tail, inference_header_content_length=told)


def cases() -> Iterator[Case]:
    for text in ("x", "", "-1", "99999999999", "1e2", "0x10", " 20", "+5", "5.0", "100000", "3"):
        yield case(f"header length {text!r}", _binary(_head(8), _TWO, text))
    yield case("header length with blanks behind", _binary(_head(8), _TWO, f"{len(_head(8))} "))
    yield case(
        "header length of the whole body",
        post(_PATH, _json(), inference_header_content_length=str(len(_json()))),
    )
    yield case("binary tail too short", _binary(_head(8), _TWO[:7]))
    yield case("binary tail too long", _binary(_head(8), _TWO + b"x"))
    yield case("binary tail missing", _binary(_head(8), b""))
    yield case("binary size too small", _binary(_head(4), _TWO))
    yield case("binary size wrong for the shape", _binary(_head(4), _TWO[:4]))
    yield case("binary size zero", _binary(_head(0, 1, 0), b""))
    yield case("binary size huge", _binary(_head(2**62), _TWO))
    yield case(
        "json and a tail", post(_PATH, _json() + _TWO, inference_header_content_length=str(len(_json())))
    )
    yield from _sent()


def _json() -> bytes:
    return http_json(_GOOD).raw.partition(b"\r\n\r\n")[2]


def _sent() -> Iterator[Case]:
    body = _json()
    yield case("content type of a form", http_json(_GOOD, content_type="application/x-www-form-urlencoded"))
    yield case("content type of text", http_json(_GOOD, content_type="text/plain"))
    yield case("no body", post(_PATH))
    yield case("chunked", _chunked(body, 10))
    yield case("chunked in one", _chunked(body, len(body)))
    start = f"POST {_PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode()
    both = b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    yield case("chunked and a length", HttpStep(start + both + _chunks(body, 10)))
    told = f"content-length: {len(body)}\r\n\r\n".encode()
    yield case("lower-case header names", HttpStep(start + told + body))
    yield case("two lengths", HttpStep(start + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"))
    for host in ("", "Host: a\r\n"):
        old = f"POST {_PATH} HTTP/1.0\r\n{host}Content-Length: {len(body)}\r\n\r\n".encode() + body
        yield case(f"HTTP/1.0 {'with' if host else 'without'} a host", HttpStep(old))


def _chunked(body: bytes, size: int) -> HttpStep:
    start = f"POST {_PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return HttpStep(start.encode() + _chunks(body, size))


def _chunks(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
