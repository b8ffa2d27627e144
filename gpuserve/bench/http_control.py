"""``Control`` over HTTP, with nothing but the standard library."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.bench.connection import tls_context
from gpuserve.bench.errors import BenchError
from gpuserve.bench.model_metadata import ModelMetadata, TensorMetadata
from gpuserve.bench.payloads import HttpRequest
from gpuserve.bench.server_time import ServerTotals, totals
from gpuserve.bench.target import Target

_MAX_TEXT: Final = 300
_HEAD_LENGTH: Final = "inference-header-content-length"


class HttpControl:
    """See ``Control``."""

    def __init__(self, target: Target) -> None:
        self._target = target
        version = f"/versions/{urllib.parse.quote(target.version, safe='')}" if target.version else ""
        self._model = f"/v2/models/{urllib.parse.quote(target.model, safe='')}{version}"
        try:
            context = tls_context(target.tls, http2=False)
        except OSError as error:
            raise BenchError(
                f"the files of TLS cannot be used: {(error.strerror or str(error)).lower()}"
            ) from None
        url = target.url
        self._connection: http.client.HTTPConnection
        if context is None:
            self._connection = http.client.HTTPConnection(url.host, url.port, timeout=target.timeout_s)
        else:
            self._connection = http.client.HTTPSConnection(
                url.host, url.port, timeout=target.timeout_s, context=context
            )

    def metadata(self) -> ModelMetadata:
        """See ``Control``."""
        found = self._json("GET", self._model)
        try:
            config = self._json("GET", f"{self._model}/config")
        except BenchError:  # a server without the extension
            config = {}
        optional = frozenset(one["name"] for one in config.get("input", ()) if one.get("optional"))
        policy = config.get("model_transaction_policy") or {}
        try:
            inputs, outputs = _tensors(found["inputs"], optional), _tensors(found["outputs"])
        except (KeyError, TypeError, ValueError):
            raise BenchError(
                f"{self._target.url} answers {self._model} with no metadata of a model"
            ) from None
        batch = int(config.get("max_batch_size", 0))
        return ModelMetadata(self._target.model, inputs, outputs, batch, bool(policy.get("decoupled")))

    def totals(self) -> ServerTotals | None:
        """See ``Control``."""
        try:
            stats = self._json("GET", f"{self._model}/stats").get("model_stats", ())
        except BenchError:
            return None
        return sum(map(totals, stats), ServerTotals())

    def infer(self, request: HttpRequest) -> dict[str, int]:
        """See ``Control``."""
        headers, body = self._send("POST", request.path, request.body, dict(request.headers))
        length = int(headers.get(_HEAD_LENGTH, len(body)))
        answer = _document(body[:length])
        sizes = {}
        for one in answer.get("outputs", ()):
            parameters = one.get("parameters", {})
            if "shared_memory_region" not in parameters:
                sizes[one["name"]] = int(parameters.get("binary_data_size", 0))
        return sizes

    def register_system(self, name: str, key: str, nbytes: int) -> None:
        """See ``Control``."""
        document = {"key": key, "offset": 0, "byte_size": nbytes}
        self._json("POST", f"/v2/systemsharedmemory/region/{name}/register", document)

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """See ``Control``."""
        document = {
            "raw_handle": {"b64": base64.b64encode(handle).decode()},
            "device_id": device,
            "byte_size": nbytes,
        }
        self._json("POST", f"/v2/cudasharedmemory/region/{name}/register", document)

    def unregister(self, name: str, *, cuda: bool) -> None:
        """See ``Control``."""
        kind = "cuda" if cuda else "system"
        self._json("POST", f"/v2/{kind}sharedmemory/region/{name}/unregister", {})

    def close(self) -> None:
        """See ``Control``."""
        self._connection.close()

    def _json(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = b"" if document is None else json.dumps(document).encode()
        return _document(self._send(method, path, body, {})[1])

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Mapping[str, str], bytes]:
        try:
            self._connection.request(method, path, body, {**headers, **dict(self._target.headers)})
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise BenchError(f"{self._target.url} cannot be reached: {reason.lower()}") from None
        finally:  # the server may close one that idles
            self._connection.close()
        if answer.status != 200:
            said = _document(content).get("error") or content[:_MAX_TEXT].decode(errors="replace")
            raise BenchError(f"{self._target.url} answers {path} with {answer.status}: {said}")
        return {name.lower(): value for name, value in answer.getheaders()}, content


def _document(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _tensors(
    found: Sequence[Mapping[str, Any]], optional: frozenset[str] = frozenset()
) -> tuple[TensorMetadata, ...]:
    return tuple(
        TensorMetadata(one["name"], one["datatype"], tuple(map(int, one["shape"])), one["name"] in optional)
        for one in found
    )
