"""All targets by their names, one input tried, and the inputs that are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import Phase, given, seed, settings

from fuzzing import (
    grpc_messages,
    header_blocks,
    http1_streams,
    http2_sessions,
    json_requests,
    openai_requests,
    worker_messages,
)
from fuzzing.costs import check_cost

CORPUS = Path(__file__).parent / "corpus"
#: By name: a file with INPUTS and check.
TARGETS: dict[str, Any] = {
    "grpc-messages": grpc_messages,
    "header-blocks": header_blocks,
    "http1-streams": http1_streams,
    "http2-sessions": http2_sessions,
    "json-requests": json_requests,
    "openai-requests": openai_requests,
    "worker-messages": worker_messages,
}


#: What reads the bytes of a client, by the same names, and is judged by what it costs.
READERS: dict[str, Any] = {"grpc-messages": grpc_messages.read, "json-requests": json_requests.read}
#: Smaller inputs cost next to nothing.
_JUDGED_NBYTES = 4 << 10


class Failed(NamedTuple):
    """The smallest input that was found to fail, and how it did."""

    target: str
    data: bytes
    error: Exception

    def keep(self) -> Path:
        """Write the input into the corpus; where it is."""
        path = CORPUS / self.target / hashlib.sha256(self.data).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.data)
        return path


def explore(target: str, first_seed: int, n: int) -> Failed | None:
    """Try so many inputs; the same for the same seed."""
    last = b""

    def one(data: bytes) -> None:
        nonlocal last
        last = data
        TARGETS[target].check(data)
        if target in READERS and len(data) >= _JUDGED_NBYTES:
            check_cost(READERS[target], data)

    # No explanation of a failure is wanted, which takes longer than to find it.
    phases = (Phase.generate, Phase.target, Phase.shrink)
    run = settings(max_examples=n, database=None, deadline=None, phases=phases, report_multiple_bugs=False)
    try:
        seed(first_seed)(run(given(TARGETS[target].INPUTS)(one)))()
    except Exception as error:  # whatever it is: the target raises what nobody has thought of
        return Failed(target, last, error)
    return None


def made(target: str, n: int) -> list[bytes]:
    """Return so many inputs of a target's generator; the same each time."""
    inputs: list[bytes] = []

    def one(data: bytes) -> None:
        inputs.append(data)

    run = settings(max_examples=n, database=None, deadline=None, phases=(Phase.generate,))
    seed(0)(run(given(TARGETS[target].INPUTS)(one)))()
    return inputs


def kept() -> Iterator[tuple[str, Path]]:
    """Every input that has failed once."""
    for target in TARGETS:
        yield from ((target, path) for path in sorted((CORPUS / target).glob("*")))
