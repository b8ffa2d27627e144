"""Callables that write to the server's log for which requests they run. INT32 in and out; 0 raises."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from gpuserve import current_model, current_request_ids
from gpuserve.decorators import batch


@batch
def tell(x: Any) -> Any:
    current_model().log(logging.INFO, f"ran {current_request_ids()}")
    return 1 // int(x.flat[0]) * x


async def tell_later(requests: Any) -> Any:
    await asyncio.sleep(0)
    current_model().log(logging.INFO, f"ran {await asyncio.to_thread(current_request_ids)}")
    return [{"y": 1 // int(one["x"].flat[0]) * one["x"]} for one in requests]
