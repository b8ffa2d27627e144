"""The response cache of all models of a front. Pure: callers choose models and count metrics."""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Final, NamedTuple

from gpuserve.front.requests.inference import InferRequest, InferResponse, OutputTensor, RegionSlice
from gpuserve_worker.memory.arena import Block

_DIGEST_NBYTES: Final = 16
#: The most bytes of inputs, and of outputs, of a response that is cached: the event loop takes 1.5 ms per MiB
#: to digest inputs, and 1 ms per MiB to copy outputs.
MAX_CACHED_NBYTES: Final = 8 << 20
#: The size of an entry and of each of its outputs besides the tensors' bytes, measured and rounded up.
#: Without these the smallest responses would take many times the limit.
_ENTRY_NBYTES: Final = 512
_OUTPUT_NBYTES: Final = 320


class CacheKey(NamedTuple):
    """The identity of requests that get the same response."""

    model: str
    digest: bytes


class CacheStatistics(NamedTuple):
    """A snapshot of the cache: ``hits`` and ``misses`` since its start, and its current contents."""

    hits: int
    misses: int
    entries: int
    nbytes: int


class _Entry(NamedTuple):
    model_name: str
    model_version: str
    parameters: dict[str, object]
    outputs: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    nbytes: int

    def response(self, request_id: str) -> InferResponse:
        outputs = [OutputTensor(*one) for one in self.outputs]
        return InferResponse(self.model_name, self.model_version, request_id, dict(self.parameters), outputs)


def cache_key(model_name: str, version: int, request: InferRequest) -> CacheKey:
    """Return the key of a request: a digest of the model, its version, outputs in order, parameters, and the
    inputs' bytes. Call it before the request runs, because a callable may write to its inputs.
    """
    import hashlib  # OpenSSL takes milliseconds to load, and most servers have no cache

    inputs = sorted(request.inputs, key=operator.attrgetter("name"))
    described = [(one.name, one.datatype, one.shape, len(one.data)) for one in inputs]
    parameters = sorted(request.parameters.items())
    # repr() distinguishes 1, 1.0, True and "1", and no text in it is ambiguous.
    head = repr((model_name, version, request.outputs, parameters, described))
    # The head contains the lengths, so the bytes of the inputs follow without separators.
    digest = hashlib.blake2b(head.encode(), digest_size=_DIGEST_NBYTES)
    for one in inputs:
        assert not isinstance(one.data, RegionSlice), "the bytes of a region are not known here"
        digest.update(one.data.view if isinstance(one.data, Block) else one.data)
    return CacheKey(model_name, digest.digest())


class ResponseCache:
    """The most recently used responses, up to ``max_nbytes``; 0 keeps none."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        #: Least recently used first.
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()
        self._nbytes = 0
        self._hits = 0
        self._misses = 0

    def lookup(self, key: CacheKey, request_id: str) -> InferResponse | None:
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry.response(request_id)

    def store(self, key: CacheKey, response: InferResponse) -> None:
        """Store a copy of a response, which the caller still closes, unless too large. Oldest entries go."""
        nbytes = sum(len(one.data) for one in response.outputs)
        if nbytes > MAX_CACHED_NBYTES:
            return
        nbytes += _ENTRY_NBYTES + len(response.outputs) * _OUTPUT_NBYTES
        if nbytes > self._max_nbytes:
            return
        self._remove(key)
        while self._nbytes + nbytes > self._max_nbytes:
            self._remove(next(iter(self._entries)))
        outputs = tuple((one.name, one.datatype, one.shape, bytes(one.data)) for one in response.outputs)
        self._entries[key] = _Entry(
            response.model_name, response.model_version, dict(response.parameters), outputs, nbytes
        )
        self._nbytes += nbytes

    def drop_model(self, name: str) -> None:
        for key in [key for key in self._entries if key.model == name]:
            self._remove(key)

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(self._hits, self._misses, len(self._entries), self._nbytes)

    def _remove(self, key: CacheKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes
