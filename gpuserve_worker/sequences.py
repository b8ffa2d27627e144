"""What an inference callable is told of sequences besides their requests: that one is no more.

A callable that keeps something for each sequence takes it away with the request whose ``sequence.end`` is
true. For those that never come that far it may have a method ``sequence_dropped(sequence_id)``; it is called
between batches, in the thread of the callable, when a sequence was idle for too long, was given up by its
client, or was known to a front process that died.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gpuserve_worker.failure import log_text, log_traceback
from gpuserve_worker.payloads import WireRequest
from gpuserve_worker.reporting import Report

HOOK: Final = "sequence_dropped"
#: ``logging.ERROR``; the module itself is not needed here.
_ERROR: Final = 40


class KnownSequences:
    """The sequences that a callable was given a part of and not yet the end."""

    def __init__(self, dropped: Callable[[int | str], Any], report: Report) -> None:
        self._dropped = dropped
        self._report = report
        self._known: set[int | str] = set()

    def before(self, requests: Sequence[WireRequest], dropped: Sequence[int | str]) -> None:
        """A batch is about to run; ``dropped`` have ended since the last one."""
        for sequence_id in dropped:
            self._drop(sequence_id)
        for request in requests:
            if request[4] is not None:
                sequence_id, _, end = request[4]
                (self._known.discard if end else self._known.add)(sequence_id)

    def forget(self) -> None:
        """Nobody will go on with any of them."""
        for sequence_id in sorted(self._known, key=str):
            self._drop(sequence_id)

    def _drop(self, sequence_id: int | str) -> None:
        self._known.discard(sequence_id)
        try:
            self._dropped(sequence_id)
        except Exception as error:  # user code may raise anything; no request fails of it
            text = f"{HOOK} raised {log_text(error)} for sequence {sequence_id!r}"
            self._report.log(_ERROR, text, log_traceback(error))


def known_sequences(inference_callable: Any, report: Report) -> KnownSequences | None:
    """What is known of the sequences of a callable; None for one that does not want to be told."""
    dropped = getattr(inference_callable, HOOK, None)
    return KnownSequences(dropped, report) if callable(dropped) else None
