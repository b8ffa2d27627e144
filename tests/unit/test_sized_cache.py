"""Free memory that was not needed for a while."""

from __future__ import annotations

from gpuserve_worker.cuda.device.arrays import SizedCache


def test_what_was_free_all_the_time_is_unused() -> None:
    cache: SizedCache[str] = SizedCache(1000)
    for nbytes, item in ((10, "a"), (20, "b"), (30, "c")):
        cache.put(nbytes, item)
    assert cache.unused() == [], "it came since the last time"
    assert cache.pop(20) == "b"
    cache.put(20, "b")
    assert cache.unused() == ["a", "c"], "b was needed"
    assert cache.unused() == ["b"]
    assert cache.nbytes == 0
