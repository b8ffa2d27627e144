"""What the response cache takes for the same request, what it keeps, and what it lets go."""

from __future__ import annotations

from typing import Any

import numpy as np
from present import present

from gpuserve.front.models.response_cache import MAX_CACHED_NBYTES, CacheKey, ResponseCache, cache_key
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor, OutputTensor
from gpuserve_worker.memory.arena import Arena

X = np.arange(4, dtype=np.float32).tobytes()


def an_input(name: str = "x", datatype: str = "FP32", shape: Any = (1, 4), data: Any = X) -> Any:
    return InputTensor(name, datatype, shape, data)


def request(*inputs: Any, request_id: str = "", outputs: Any = (), **parameters: Any) -> InferRequest:
    return InferRequest("m", "", request_id, parameters, list(inputs or [an_input()]), outputs, None)


def response(nbytes: int = 16, name: str = "m", **parameters: Any) -> InferResponse:
    tensor = OutputTensor("y", "UINT8", (1, nbytes), memoryview(bytearray(nbytes)))
    return InferResponse(name, "1", "first", parameters, [tensor])


def key(number: int, model: str = "m") -> CacheKey:
    return CacheKey(model, number.to_bytes(16, "little"))


BASE = cache_key("m", 1, request())


# ---- the key --------------------------------------------------------------------------------


def test_requests_that_ask_the_same_have_the_same_key() -> None:
    for same in (
        request(),
        request(request_id="another id"),
        request(an_input(data=memoryview(X))),
        InferRequest("m", "1", "", {}, [an_input()], (), 2.0, priority=3, empty_final=True),
    ):
        assert cache_key("m", 1, same) == BASE
    a, b = an_input("a"), an_input("b", data=bytes(16))
    assert cache_key("m", 1, request(a, b, k=1, n=2)) == cache_key("m", 1, request(b, a, n=2, k=1))


def test_a_body_in_the_arena_has_the_key_of_its_bytes() -> None:
    arena = Arena(1 << 26, lambda *_: None, lambda *_: None)
    block = arena.allocate(16)
    block.view[:] = X
    assert cache_key("m", 1, request(an_input(data=block))) == BASE
    arena.free(block)
    arena.close()


def test_requests_that_ask_something_else_have_another_key() -> None:
    others = [
        request(an_input(data=bytes(16))),
        request(an_input("z")),
        request(an_input(datatype="INT32")),
        request(an_input(shape=(4, 1))),
        request(an_input(), an_input("z")),
        *(request(outputs=outputs) for outputs in (("y",), ("y", "z"), ("z", "y"))),
        request(k=1),
    ]
    keys = {BASE, cache_key("n", 1, request()), cache_key("m", 2, request())}
    assert len(keys | {cache_key("m", 1, one) for one in others}) == 3 + len(others)


def test_parameters_differ_by_type_and_bytes_cannot_move_between_inputs() -> None:
    values = (1, 1.0, True, "1", "True")
    assert len({cache_key("m", 1, request(k=value)) for value in values}) == len(values)
    cut_at_1 = request(an_input("a", "UINT8", (1,), b"1"), an_input("b", "UINT8", (2,), b"23"))
    cut_at_2 = request(an_input("a", "UINT8", (2,), b"12"), an_input("b", "UINT8", (1,), b"3"))
    assert cache_key("m", 1, cut_at_1) != cache_key("m", 1, cut_at_2)


# ---- the entries ----------------------------------------------------------------------------


def test_a_hit_is_a_copy_with_the_id_of_its_request() -> None:
    cache = ResponseCache(1 << 20)
    memory = bytearray(b"abcd")
    closed: list[bool] = []
    tensor = OutputTensor("y", "UINT8", (1, 4), memoryview(memory))
    first = InferResponse("m", "1", "first", {"k": 1}, [tensor], lambda: closed.append(True))
    assert cache.lookup(BASE, "first") is None
    cache.store(BASE, first)
    assert closed == [], "the response stays its owner's to close"
    memory[:] = b"gone"
    hit = present(cache.lookup(BASE, "second"))
    assert (hit.model_name, hit.model_version, hit.id, hit.parameters) == ("m", "1", "second", {"k": 1})
    (output,) = hit.outputs
    assert (output.name, output.datatype, output.shape, output.data) == ("y", "UINT8", (1, 4), b"abcd")
    hit.parameters["k"] = 2
    hit.outputs.clear()
    hit.close()
    again = present(cache.lookup(BASE, ""))
    assert (again.parameters, len(again.outputs)) == ({"k": 1}, 1)
    assert cache.statistics()[:3] == (2, 1, 1)


def kept(cache: ResponseCache, numbers: range, model: str = "m") -> list[int]:
    """The numbers of the keys that the cache has a response for."""
    return [number for number in numbers if cache.lookup(key(number, model), "") is not None]


def test_what_was_used_last_stays() -> None:
    cache = ResponseCache(3 * 2000)
    for number in range(3):
        cache.store(key(number), response(1000))
    assert cache.lookup(key(0), "") is not None
    cache.store(key(3), response(1000))
    assert kept(cache, range(4)) == [0, 2, 3]


def test_it_never_holds_more_than_it_may_and_the_smallest_entries_take_room_too() -> None:
    cache = ResponseCache(10_000)
    for number in range(200):
        cache.store(key(number), response(number * 37 % 3000))
        assert cache.statistics().nbytes <= 10_000
    assert cache.statistics().entries >= 3
    cache = ResponseCache(100_000)
    for number in range(1000):
        cache.store(key(number), response(0))
    assert 50 <= cache.statistics().entries <= 200


def test_what_is_larger_than_the_cache_is_not_kept_and_displaces_nothing() -> None:
    cache = ResponseCache(2000)
    cache.store(key(0), response(100))
    before = cache.statistics()
    cache.store(key(1), response(2000))
    assert cache.statistics() == before
    assert kept(cache, range(2)) == [0]
    nothing = ResponseCache(0)
    nothing.store(BASE, response(0))
    assert nothing.lookup(BASE, "") is None
    assert nothing.statistics() == (0, 1, 0, 0)


def test_a_response_that_takes_long_to_copy_is_not_kept() -> None:
    cache = ResponseCache(4 * MAX_CACHED_NBYTES)
    for number, nbytes in enumerate((MAX_CACHED_NBYTES, MAX_CACHED_NBYTES + 1)):
        cache.store(key(number), response(nbytes))
    assert kept(cache, range(2)) == [0]


def test_storing_again_replaces() -> None:
    cache = ResponseCache(1 << 20)
    for nbytes in (100, 5):
        cache.store(BASE, response(nbytes))
    hit = present(cache.lookup(BASE, ""))
    assert len(hit.outputs[0].data) == 5
    alone = ResponseCache(1 << 20)
    alone.store(BASE, response(5))
    assert cache.statistics().nbytes == alone.statistics().nbytes


def test_a_model_that_goes_takes_its_entries_with_it() -> None:
    cache = ResponseCache(1 << 20)
    cache.store(key(0), response())
    cache.store(key(0, "other"), response(name="other"))
    cache.store(key(1), response())
    cache.drop_model("m")
    cache.drop_model("m")
    assert (kept(cache, range(2)), kept(cache, range(2), "other")) == ([], [0])
    cache.drop_model("other")
    assert cache.statistics()[2:] == (0, 0)
