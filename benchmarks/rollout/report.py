"""The report: values in, Markdown out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.rollout.journal import Event, Journal, What
from benchmarks.rollout.load import Failure
from benchmarks.rollout.outcomes import Kind, Outcome, Outcomes, Way
from benchmarks.rollout.scenarios import Scenario, Step
from benchmarks.scenarios.figures import percentile

#: After a crash its connections and the endpoint list take so long at most to forget the pod.
_AFTERMATH_S: Final = 10.0
#: What may explain a failure happened within this time.
_BEFORE_S: Final = 20.0
_MOST_LISTED: Final = 30
_HOW: Final = """\
By kind, over all of the run. *Direct*: grpcio's `round_robin` over the addresses of all pods there may be, or
HTTP connections that are kept, new ones to an endpoint that the client has heard of. *Envoy*: what `gpuserve
export envoy` writes. *Asked again*: the client saw a failure that may pass (503, UNAVAILABLE, a connection
that broke), and asked once more. Times count from the moment that was fixed for a request beforehand."""
_LIMITS: Final = """\
- All pods are on one machine, on addresses of the loopback device. An address without a pod refuses at once,
  where in a cluster packets may vanish.
- The endpoint list and its delays are those of the harness; kube-proxy itself is not there. An HTTP client
  here chooses among the endpoints that it knows when it connects, as kube-proxy would choose for it.
- Models on the CPU that do next to nothing. No GPU.
- Pods run as the user who started this, without limits of memory or CPU, and see the whole file system."""


@dataclass(frozen=True, slots=True)
class Findings:
    """A run. ``about``: what was set, and what the YAML said, by name. Times are of ``time.monotonic``."""

    about: Mapping[str, str]
    steps: Sequence[Step]
    outcomes: Outcomes
    #: Attempts after which the client made another.
    failures: Sequence[Failure]
    #: Requests that Envoy sent more than once.
    n_sent_again: Mapping[Kind, int]
    journal: Journal

    @property
    def lost(self) -> list[Outcome]:
        """The lost requests, of which there must be none."""
        return [one for one in self.outcomes.lost if not self._is_excused(one)]

    @property
    def excused(self) -> list[Outcome]:
        """Lost with a pod that was killed, by a client without Envoy."""
        return [one for one in self.outcomes.lost if self._is_excused(one)]

    @property
    def unexplained(self) -> list[Failure]:
        """Attempts that failed without a crash: clients should not notice the end of a pod at all."""
        return [one for one in self.failures if not self._with_a_crash(one.at_s, one.at_s)]

    @property
    def explained(self) -> list[Failure]:
        """Attempts that failed with a pod that was killed."""
        return [one for one in self.failures if self._with_a_crash(one.at_s, one.at_s)]

    @property
    def outlived_grace(self) -> list[Event]:
        return list(self.journal.of(What.OUTLIVED_GRACE))

    def good(self) -> bool:
        return bool(self.outcomes.all) and not self.lost and not self.outlived_grace

    def _is_excused(self, lost: Outcome) -> bool:
        return lost.way is Way.DIRECT and self._with_a_crash(lost.due_s, lost.ended_s)

    def _with_a_crash(self, began_s: float, ended_s: float) -> bool:
        crashes = (event.at_s for event in self.journal.of(What.CRASHED))
        return any(began_s <= at_s + _AFTERMATH_S and at_s <= ended_s for at_s in crashes)


def markdown(findings: Findings) -> str:
    """The whole report as Markdown."""
    parts = [
        "# Rollouts under load",
        _verdict(findings),
        "Written by `scripts/rollout`; [Kubernetes](kubernetes.md) says what it is about.",
        "## What was done",
        "\n".join(f"- {name}: {value}" for name, value in findings.about.items()),
        "## What became of the requests",
        _table(
            ("", "steps", "s", "requests", "asked again", "lost", "p50 ms", "p99 ms"), _scenarios(findings)
        ),
        _HOW,
        _table(
            ("kind", "way", "requests", "asked again", "lost", "p50 ms", "p99 ms", "most ms"),
            _kinds(findings),
        ),
        _sent_again(findings),
        "## What became of the pods",
        "\n".join(f"- {line}" for line in _pods(findings)),
        *_lost("Lost", findings.lost, findings),
        *_lost("Lost with a pod that was killed", findings.excused, findings),
        *_explained(findings),
        *_unexplained(findings),
        "## What this does not show",
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(findings: Findings) -> str:
    text = f"**{len(findings.outcomes.all):,} requests, {len(findings.lost):,} lost.**"
    if findings.excused:
        text += (
            f" Besides, {len(findings.excused):,} without Envoy ended with a pod that was killed; see below."
        )
    if findings.unexplained:
        n_failures = len(findings.unexplained)
        text += f" {n_failures:,} attempts failed though no pod was killed, and were made good by the client."
    if findings.outlived_grace:
        text += f" {len(findings.outlived_grace)} pods outlived their grace period."
    return text


def _scenarios(findings: Findings) -> Iterator[tuple[str, ...]]:
    """A request belongs to the scenario in which it was due."""
    for scenario in Scenario:
        steps = [step for step in findings.steps if step.scenario is scenario]
        if steps:
            began_s, ended_s = steps[0].began_s, steps[-1].ended_s
            seen = list(findings.outcomes.during(began_s, ended_s))
            yield scenario.value, f"{len(steps)}", f"{ended_s - began_s:.0f}", *_figures(seen)[:-1]


def _kinds(findings: Findings) -> Iterator[tuple[str, ...]]:
    for kind in Kind:
        for way in Way:
            seen = list(findings.outcomes.of(kind, way))
            if seen:
                yield f"`{kind.value}`", way.value, *_figures(seen)


def _figures(seen: Sequence[Outcome]) -> tuple[str, ...]:
    """How many, asked again, lost; p50, p99 and the most in ms."""
    counts = len(seen), sum(one.retried for one in seen), sum(bool(one.lost) for one in seen)
    times = [one.latency_s * 1e3 for one in seen if not one.lost]
    figures = (percentile(times, 50), percentile(times, 99), max(times)) if times else (0.0, 0.0, 0.0)
    return *(f"{count:,}" for count in counts), *(f"{figure:.1f}" for figure in figures)


def _sent_again(findings: Findings) -> str:
    counts = ", ".join(f"`{kind.value}` {findings.n_sent_again.get(kind, 0):,}" for kind in Kind)
    return f"Requests that Envoy sent more than once, which its clients do not notice: {counts}."


def _pods(findings: Findings) -> Iterator[str]:
    journal = findings.journal
    yield f"{_count(journal, What.CREATED)} pods were created, {_count(journal, What.DELETED)} deleted."
    yield f"{_count(journal, What.STARTED)} containers were started."
    if ending_s := journal.endings_s():
        median_s, most_s = percentile(ending_s, 50), max(ending_s)
        yield f"From SIGTERM to the exit: {median_s:.2f} s in the median, {most_s:.2f} s at most."
    yield f"{len(findings.outlived_grace)} had to be killed at the end of their grace period."


def _count(journal: Journal, what: What) -> int:
    return sum(1 for _ in journal.of(what))


def _lost(title: str, lost: Sequence[Outcome], findings: Findings) -> Iterator[str]:
    if not lost:
        return
    yield f"## {title}"
    yield _causes((one.kind, one.way, one.lost) for one in lost)
    rows = (
        (one.kind.value, one.way.value, f"{one.latency_s * 1e3:.0f}", *_shortly_before(one.ended_s, findings))
        for one in lost[:_MOST_LISTED]
    )
    yield _table(("kind", "way", "took ms", "at s", "pods shortly before"), rows)


def _explained(findings: Findings) -> Iterator[str]:
    if failures := findings.explained:
        yield "## Asked again after a crash"
        yield "A stream that had begun breaks behind Envoy too: nobody but its client can repeat it."
        yield _causes((one.kind, one.way, one.why) for one in failures)


def _unexplained(findings: Findings) -> Iterator[str]:
    failures = findings.unexplained
    if not failures:
        return
    yield "## Asked again without a crash"
    yield _causes((one.kind, one.way, one.why) for one in failures)
    rows = (
        (one.kind.value, one.way.value, *_shortly_before(one.at_s, findings))
        for one in failures[:_MOST_LISTED]
    )
    yield _table(("kind", "way", "at s", "pods shortly before"), rows)


def _causes(failures: Iterable[tuple[Kind, Way, str]]) -> str:
    counted = Counter((kind.value, way.value, _cell(why)) for kind, way, why in failures)
    rows = ((*cause, f"{count:,}") for cause, count in counted.most_common(_MOST_LISTED))
    return _table(("kind", "way", "why", "times"), rows)


def _shortly_before(at_s: float, findings: Findings) -> tuple[str, str]:
    """When it was, from the first event on, and what had happened to pods."""
    events = findings.journal.events
    began_s = events[0].at_s if events else 0.0
    before = findings.journal.before(at_s, _BEFORE_S)[-5:]
    told = "; ".join(f"{event.at_s - at_s:+.2f} s {event.address} {event.what.value}" for event in before)
    return f"{at_s - began_s:.2f}", told


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
