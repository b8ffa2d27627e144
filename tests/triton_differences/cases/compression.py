"""Compressed bodies of HTTP, both ways: section 2.16."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator

from triton_differences.steps import Case, HttpStep, case, post
from triton_differences.tensors import In, Inference, http_binary, http_json

_PATH = "/v2/models/echo_FP32/infer"
_GOOD = Inference("echo_FP32", [In("x", "FP32", [1, 64], [1.0] * 64)])


def _body(step: HttpStep) -> bytes:
    return step.raw.partition(b"\r\n\r\n")[2]


def cases() -> Iterator[Case]:
    plain = _body(http_json(_GOOD))
    for name, body in {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "identity": plain,
        "br": plain,
        "gzip, deflate": gzip.compress(plain),
        "GZIP": gzip.compress(plain),
        "": plain,
    }.items():
        yield case(f"content-encoding {name!r}", post(_PATH, body, content_encoding=name))
    yield case("gzip that is not", post(_PATH, plain, content_encoding="gzip"))
    yield case("gzip cut", post(_PATH, gzip.compress(plain)[:-9], content_encoding="gzip"))
    yield case("gzip with more behind", post(_PATH, gzip.compress(plain) + b"xyz", content_encoding="gzip"))
    yield case("deflate that is not", post(_PATH, plain, content_encoding="deflate"))
    yield from _binary()
    for accepted in (
        *("gzip", "deflate", "identity", "br", "*", "gzip, deflate", "deflate, gzip", "GZIP"),
        *("gzip;q=0.5, deflate;q=0.8", "gzip;q=0", "identity;q=0.5, gzip;q=0.2", ""),
    ):
        yield case(f"accept-encoding {accepted!r}", http_json(_GOOD, accept_encoding=accepted))
    yield case("accept-encoding of an error", post(_PATH, b"{", accept_encoding="gzip"))
    yield case(
        "generate compressed",
        post("/v2/models/shout/generate", gzip.compress(b"{}"), content_encoding="gzip"),
    )


def _binary() -> Iterator[Case]:
    body = _body(http_binary(_GOOD))
    length = str(body.index(b"}}") + 2)
    step = post(
        _PATH,
        gzip.compress(body),
        content_encoding="gzip",
        inference_header_content_length=str(_json_length(body)),
    )
    yield case("gzip of JSON and binary", step)
    short = post(_PATH, gzip.compress(body), content_encoding="gzip", inference_header_content_length=length)
    yield case("gzip and a wrong header length", short)


def _json_length(body: bytes) -> int:
    return len(body) - 256
