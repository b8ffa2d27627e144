"""The section of the rows: one load each, on every server that speaks so. Measured, then told as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from benchmarks import load
from benchmarks.figures import table, yes_or_no
from benchmarks.report import Part, Plan, Section
from benchmarks.rounds import (
    OURS,
    Baseline,
    Comparison,
    LoadedServer,
    Memcpy,
    Sample,
    Samples,
    Subject,
    measure,
)
from benchmarks.rows import ROWS, WITHOUT, Measure, Row
from benchmarks.servers.server import ECHO, MODELS, Kind, Option, RunningServer, Server, ServerFailed, running

#: A process with less of the CPU time of its server is left out of the table; JSON has it.
_SHOWN_SHARE = 0.01


class Requests(Section):
    """A section with rows of requests, on servers with these models."""

    key: ClassVar[str] = "rows"
    rows: ClassVar[tuple[Row, ...]] = ROWS
    models: ClassVar[tuple[str, ...]] = MODELS

    def __init__(self) -> None:
        self.names = tuple(row.name for row in self.rows)

    def missing(self, name: str) -> str | None:
        return next((load.missing(row.load) for row in self.rows if row.name == name), None)

    def servers(self, plan: Plan) -> Sequence[Server]:
        return plan.servers

    def measure(self, plan: Plan) -> RequestPart | None:
        rows, servers = [row for row in self.rows if row.name in plan.names], self.servers(plan)
        if not rows or not servers:
            return None
        for one in servers:
            one.prepare()
        titles, samples = measured(rows, dataclasses.replace(plan, servers=servers), self.models)
        kinds = {one.name: one.kind for one in servers}
        kinds |= {WITHOUT: Kind.BASELINE, Memcpy.name: Kind.FLOOR}
        return RequestPart(rows, titles, Comparison(kinds, samples), self.key)


def measured(
    rows: Sequence[Row], plan: Plan, models: Sequence[str] = MODELS
) -> tuple[dict[str, str], Samples]:
    """All servers of a plan up that can run one of the rows, and the rows run on them and on the copy.

    A server that does not come up is left out, and named among what failed.

    Returns:
        Titles by name of what was measured, and the samples.
    """
    not_up: dict[str, str] = {}
    subjects: list[Subject] = []
    with ExitStack() as stack:
        for server in plan.servers:
            up: dict[Option | None, RunningServer] = {}
            for option in options_of(server, rows):
                one = server.started_with(option)
                try:
                    up[option] = stack.enter_context(
                        running(one, plan.logs, models if option is None else (ECHO,))
                    )
                except ServerFailed as error:
                    not_up[one.log_name] = str(error)
                    plan.say(f"not measured: {one.log_name} did not come up")
            subjects.append(LoadedServer(server, up))
            if server.kind is Kind.OURS and any(row.has_baseline for row in rows):
                subjects.append(Baseline(server, up))
        subjects.append(Memcpy())
        samples = measure(rows, subjects, plan.rounds, plan.seconds, plan.say)
    samples.not_up.update(not_up)
    return {one.name: one.title for one in subjects}, samples


def options_of(server: Server, rows: Sequence[Row]) -> list[Option | None]:
    """With what a server is started for the rows that it can run; None is as it is."""
    runs = [row for row in rows if load.api_between(row.load, server) is not None]
    options = dict.fromkeys(row.load.option for row in runs)
    if server.kind is Kind.OURS and any(row.has_baseline for row in runs):
        options[None] = None
    return list(options)


@dataclass(frozen=True, slots=True)
class RequestPart(Part):
    """The rows as they were measured. ``titles`` by server name, in the order of the columns."""

    rows: Sequence[Row]
    titles: Mapping[str, str]
    comparison: Comparison
    key: str = "rows"

    @property
    def failures(self) -> dict[str, str]:
        """By row and server, or by server."""
        pairs = self._samples.failures.items()
        failures = {f"row {row}, server {server}": text for (row, server), text in pairs}
        return {f"server {server}": text for server, text in self._samples.not_up.items()} | failures

    @property
    def _samples(self) -> Samples:
        return self.comparison.samples

    def markdown(self) -> str:
        """Return what each server does, our ratios, the goals, and the CPU time."""
        kinds, titles, rows = self.comparison.kinds, self.titles, self.rows
        heads = {
            name: f"floor: {title}" if kinds[name] is Kind.FLOOR else title for name, title in titles.items()
        }
        ran = [name for name in titles if any(self._value(row, name) != "-" for row in rows)]
        values = ([f"{r.title} ({r.measure.value})", *(self._value(r, name) for name in ran)] for r in rows)
        cpu = {name: [cpu_cell(self._samples_of(row, name)) for row in rows] for name in titles}
        busy = [
            name
            for name in titles
            if any(one.cpu_s_by_role for r in rows for one in self._samples_of(r, name))
        ]
        cpu_head = "CPU µs an answer, all processes of the server (each)"
        cpu_lines = ([row.title, *(cpu[name][at] for name in busy)] for at, row in enumerate(rows))
        blocks = [
            table(["", *(heads[name] for name in ran)], values),
            self._ratios([name for name in titles if kinds[name] is Kind.PEER]),
            self._goals(),
            table([cpu_head, *(heads[name] for name in busy)], cpu_lines),
            conditions(self._samples),
        ]
        return "\n\n".join(block for block in blocks if block)

    def document(self) -> dict[str, object]:
        return {row.name: row_document(row, self.titles, self._samples) for row in self.rows}

    def _samples_of(self, row: Row, server: str) -> Sequence[Sample]:
        return self._samples.by_pair.get((row.name, server), ())

    def _value(self, row: Row, server: str) -> str:
        if (row.name, server) in self._samples.failures:
            return "FAILED"
        if not (samples := self._samples_of(row, server)):
            return "-"
        value = median(one.value for one in samples)
        return f"{value:.3f}" if row.measure is Measure.LATENCY else f"{value:,.0f}"

    def _ratios(self, peers: Sequence[str]) -> str:
        lines = [
            [row.title, *(str(self.comparison.ratio(row, name) or "-") for name in peers)]
            for row in self.rows
            if self.comparison.complete(row, OURS)
        ]
        header = ["gpuserve / peer, median (range) of the rounds", *(self.titles[name] for name in peers)]
        return table(header, lines) if lines and peers else ""

    def _goals(self) -> str:
        lines = []
        for row in self.rows:
            for one in self.comparison.verdicts(row):
                title = self.titles.get(one.against, one.against)
                against = f"the best peer: {title}" if one.is_best else title
                reached = "not measured" if one.reached is None else yes_or_no(one.reached)
                lines.append([row.title, against, str(one.ratio or "-"), str(one.target), reached])
        header = ["Goal of the row", "against", "ratio", "to reach", "reached"]
        return table(header, lines, left=2) if lines else ""


def conditions(samples: Samples) -> str:
    """What else the machine did meanwhile."""
    others = [sample.others_share for runs in samples.by_pair.values() for sample in runs]
    if not others:
        return ""
    return f"Other processes used {median(others):.0%} of the machine (at most {max(others):.0%} in a run)."


def cpu_cell(samples: Sequence[Sample]) -> str:
    """The total, and in brackets what each process has of it, the busiest first."""
    if not samples:
        return "-"
    total_s = median(one.cpu_s_per_answer for one in samples)
    roles = {role for one in samples for role in one.cpu_s_by_role}
    by_role = {role: median(one.cpu_s_by_role.get(role, 0.0) for one in samples) for role in roles}
    shown = sorted(
        ((used_s, role) for role, used_s in by_role.items() if used_s > total_s * _SHOWN_SHARE), reverse=True
    )
    parts = ", ".join(f"{role} {used_s * 1e6:,.0f}" for used_s, role in shown)
    return f"{total_s * 1e6:,.0f} ({parts})" if len(shown) > 1 else f"{total_s * 1e6:,.0f}"


def row_document(row: Row, servers: Mapping[str, str], samples: Samples) -> dict[str, object]:
    columns = {
        name: {
            column.name: [getattr(one, column.name) for one in samples.by_pair.get((row.name, name), ())]
            for column in dataclasses.fields(Sample)
        }
        for name in servers
    }
    failed = [name for name in servers if (row.name, name) in samples.failures]
    return {"title": row.title, "unit": row.measure.value, "servers": columns, "failed": failed}
