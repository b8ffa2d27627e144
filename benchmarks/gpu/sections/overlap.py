"""Copies and compute at the same time, as throughput and on a timeline.

``overlap``: the model's kernel takes as long as everything else that the server does with one request: bring
its input to the device, take its output back. With several requests under way the two can run at the same
time, so twice the throughput of one request after the other is the limit.

``profile``: which stream did what and when, by CUDA's own events in the worker. Makes the pictures and the
page of the documentation. The events cost the worker time: no figure of it is a benchmark.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.figures import Figure, Goal
from benchmarks.gpu.running.section import Findings, SectionFailed, Site, ratio_figure
from benchmarks.gpu.served.client import calling, host_requests
from benchmarks.gpu.served.load import LoadClients, load_clients
from benchmarks.gpu.served.serving import Model, serving, tensor
from benchmarks.gpu.served.timeline import Span, overlapped, spans, svg, window
from benchmarks.servers.server import RunningServer

_NBYTES: Final = 32 << 20
_GOAL: Final = Goal(1.8, at_least=True)
#: Requests under way: one computes, one is brought, one is taken back, one is with the client.
_IN_FLIGHT: Final = 4
_ALONE: Final = "copies"
_PREFETCH: Final = (1, 0)


def overlap(site: Site, findings: Findings) -> None:
    nbytes, rounds = min(_NBYTES, site.effort.largest_nbytes), range(site.effort.rounds)
    with load_clients(findings) as clients:

        def rate(one: RunningServer, model: str, in_flight: int = 1) -> float:
            """Requests a second to a model, so many of them under way."""
            with calling(one) as caller, host_requests(caller, model, nbytes, in_flight) as messages:
                case = f"{model}, {in_flight} under way"
                return clients.load(one, messages, site.effort.seconds, case).answers_per_s

        with serving(site, "copies-alone", [_model(_ALONE, 0.0, 1)]) as one:
            copies_s = median(1 / rate(one, _ALONE) for _ in rounds)
        findings.note(
            f"One request brings {nbytes >> 10} KiB in shared memory and takes as much back: "
            f"{copies_s * 1e3:.3g} ms without compute. The kernel of the model takes as long"
        )
        models = {f"prefetch-{prefetch}": prefetch for prefetch in _PREFETCH}
        with serving(site, "overlap", [_model(name, copies_s, n) for name, n in models.items()]) as one:
            for name, prefetch in models.items():
                pairs = [(rate(one, name), rate(one, name, _IN_FLIGHT)) for _ in rounds]
                serial, at_once = map(list, zip(*pairs, strict=True))
                details = {"at the same time, req/s": at_once, "serially, req/s": serial}
                goal = _GOAL if prefetch else None
                label = f"prefetch {prefetch}, {_IN_FLIGHT} under way / one"
                findings.add(ratio_figure(label, "times the throughput", at_once, serial, goal, **details))


def _model(name: str, seconds: float, prefetch: int) -> Model:
    settings = {"prefetch": prefetch, "read_only_inputs": True}
    x, y = tensor("x", "float32", -1), tensor("y", "float32", -1)
    kwargs = {"seconds": seconds}
    return Model(name, "device_models.py:Echo", [x], [y], array="cupy", kwargs=kwargs, settings=settings)


# ---- the timeline ---------------------------------------------------------------------------------

_MODEL: Final = "echo"
_PROFILED_NBYTES: Final = 16 << 20
_COMPUTE_S: Final = 0.002
_PAGE: Final = "gpu_timeline.md"
#: Name of the picture: requests under way, calls shown, title.
_PICTURES: Final = {
    "gpu_timeline.svg": (1, 1, "One request"),
    "gpu_overlap.svg": (4, 4, "Several requests under way"),
}


def profile(site: Site, findings: Findings) -> None:
    nbytes = min(_PROFILED_NBYTES, site.effort.largest_nbytes)
    with load_clients(findings) as clients:
        shown = {name: _profiled(site, clients, name, nbytes) for name in _PICTURES}
    for name, found in shown.items():
        where = "Stand-in, not a GPU: " if site.stand_in else ""
        title = f"{where}{_PICTURES[name][2]} of {nbytes >> 10} KiB each way"
        (site.folder / name).write_text(svg(found, title))
        share = overlapped(found)
        findings.add(Figure(_PICTURES[name][2], "part of the compute with a copy beside it", (share,)))
    findings.keep(timeline={name: [asdict(one) for one in found] for name, found in shown.items()})
    findings.note(f"The pictures are {' and '.join(shown)}, with {_PAGE} around them")
    (site.folder / _PAGE).write_text(_page(shown, nbytes, site.stand_in))


def _profiled(site: Site, clients: LoadClients, name: str, nbytes: int) -> list[Span]:
    in_flight, calls, _ = _PICTURES[name]
    label = Path(name).stem
    lines = site.folder / f"{label}.lines"
    x, y = tensor("x", "float32", -1), tensor("y", "float32", -1)
    model = Model(_MODEL, "device_models.py:Echo", [x], [y], array="cupy", kwargs={"seconds": _COMPUTE_S})
    with (
        serving(site, label, [model], {"GPUSERVE_CUDA_TIMELINE": str(lines)}) as one,
        calling(one) as caller,
        host_requests(caller, _MODEL, nbytes, in_flight) as messages,
    ):
        clients.load(one, messages, site.effort.seconds, name)
    written = [line for file in site.folder.glob(f"{lines.name}.*") for line in file.read_text().splitlines()]
    try:
        return window(spans(written), calls)
    except ValueError as error:
        raise SectionFailed(str(error)) from None


def _page(shown: dict[str, list[Span]], nbytes: int, stand_in: bool) -> str:
    blocks = [
        "# Streams and copies of a request" + (" (stand-in for CUDA, not a GPU)" if stand_in else ""),
        f"Made by `scripts/gpu_check` from a profile: a model whose kernel takes {_COMPUTE_S * 1e3:g} ms, "
        f"tensors of {nbytes / (1 << 20):g} MiB each way in the client's shared memory. Times are those of "
        "CUDA events around each copy and each call, on the clock of the device; the events themselves slow "
        "the worker down a little. A tick above a bar is the moment at which the worker asked for it.",
        "Inputs go to the device on one stream, the callable computes on the default stream, outputs come "
        "back on a third one. Events order the three; the worker waits for none of them before the answer "
        "is there.",
    ]
    for name, found in shown.items():
        _, _, title = _PICTURES[name]
        blocks.append(f"## {title}")
        blocks.append(f"![{title}: copies to the device, compute, copies to the host over time]({name})")
        blocks.append(f"A copy ran during {overlapped(found):.0%} of the time of the calls.")
    return "\n\n".join(blocks) + "\n"
