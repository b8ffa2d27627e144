"""Keeps a slice of what it is given until it is called with a negative first element."""

from __future__ import annotations

import threading
from typing import Any

from gpuserve.decorators import batch

kept: list[Any] = []


@batch
def slices(x: Any) -> Any:
    if x.flat[0] < 0:
        kept.clear()
    else:
        kept.append(x[:1, 1:2].T)
    return {"y": x[:, :1] * 2}


@batch
def until_other_thread(x: Any) -> Any:
    """As above, but the last array dies in another thread."""
    if x.flat[0] < 0:
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    else:
        kept.append(x.reshape(-1))
    return {"y": x[:, :1] * 2}


@batch
def last_only(x: Any) -> Any:
    """Keeps the newest input; the one before dies during the call."""
    kept[:] = [memoryview(x)]
    return {"y": x[:, :1] * 2}
