"""What a door has said of itself, with what those before it in its place had counted. Pure."""

from __future__ import annotations

from collections import Counter

from gpuserve.front.passage.messages import Status


class Tally:
    """The account of one door over all of its processes. ``refused`` and ``late`` are as in ``Admission``."""

    def __init__(self) -> None:
        self.restarts = 0
        self._said: Status | None = None
        self._past_requests = 0
        self._past_cpu_s = 0.0
        self._past_refused: Counter[str] = Counter()
        self._past_late: Counter[str] = Counter()

    def note(self, status: Status) -> None:
        self._said = status

    def end(self) -> None:
        """The process has ended: what it counted stays counted."""
        said, self._said = self._said, None
        if said is not None:
            self._past_requests += said.n_requests
            self._past_cpu_s += said.cpu_s
            self._past_refused.update(said.refused)
            self._past_late.update(said.late)

    def n_unaware(self, n_notices: int, n_open: int) -> int:
        """Of so many connections, after so many notices; one that was not heard of counts for all."""
        if not n_notices:
            return 0
        said = self._said
        return n_open if said is None or said.notice < n_notices else said.n_unaware

    @property
    def n_held(self) -> int:
        return 0 if self._said is None else self._said.n_held

    @property
    def n_streams(self) -> int:
        return 0 if self._said is None else self._said.n_streams

    @property
    def unsent_nbytes(self) -> int:
        return 0 if self._said is None else self._said.unsent_nbytes

    @property
    def n_requests(self) -> int:
        return self._past_requests + (0 if self._said is None else self._said.n_requests)

    @property
    def cpu_s(self) -> float:
        return self._past_cpu_s + (0.0 if self._said is None else self._said.cpu_s)

    @property
    def refused(self) -> Counter[str]:
        return self._past_refused + Counter({} if self._said is None else self._said.refused)

    @property
    def late(self) -> Counter[str]:
        return self._past_late + Counter({} if self._said is None else self._said.late)
