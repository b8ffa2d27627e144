"""Copies and compute at the same time. The model's kernel takes as long as everything else that the server
does with one request: bring its input to the device, take its output back. With several requests under way
the two can run at the same time, so twice the throughput of one request after the other is the limit.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from benchmarks.figures import Goal
from benchmarks.gpu.running.section import Effort, Findings, Site, ratio_figure
from benchmarks.gpu.served.client import calling, host_requests
from benchmarks.gpu.served.load import LoadClients, load_clients
from benchmarks.gpu.served.serving import Model, serving, tensor
from benchmarks.servers.server import RunningServer

_NBYTES: Final = 32 << 20
_GOAL: Final = Goal(1.8, at_least=True)
#: Requests under way: one computes, one is brought, one is taken back, one is with the client.
_IN_FLIGHT: Final = 4
_ALONE: Final = "copies"
_PREFETCH: Final = (1, 0)


def run(site: Site, findings: Findings) -> None:
    nbytes = min(_NBYTES, site.effort.largest_nbytes)
    with load_clients(findings) as clients:
        _measure(site, findings, clients, nbytes)


def _measure(site: Site, findings: Findings, clients: LoadClients, nbytes: int) -> None:
    alone = _ALONE, nbytes, 1
    with serving(site, "copies-alone", [_model(_ALONE, 0.0, 1)]) as one:
        copies_s = median(1 / _rate(one, clients, alone, site.effort) for _ in range(site.effort.rounds))
    findings.note(
        f"One request brings {nbytes >> 10} KiB in shared memory and takes as much back: "
        f"{copies_s * 1e3:.3g} ms without compute. The kernel of the model takes as long"
    )
    models = [_model(_name(prefetch), copies_s, prefetch) for prefetch in _PREFETCH]
    with serving(site, "overlap", models) as one:
        for prefetch in _PREFETCH:
            serial, at_once = [], []
            for _ in range(site.effort.rounds):
                serial.append(_rate(one, clients, (_name(prefetch), nbytes, 1), site.effort))
                case = _name(prefetch), nbytes, _IN_FLIGHT
                at_once.append(_rate(one, clients, case, site.effort))
            details = {"at the same time, req/s": at_once, "serially, req/s": serial}
            goal = _GOAL if prefetch else None
            label = f"prefetch {prefetch}, {_IN_FLIGHT} under way / one"
            findings.add(ratio_figure(label, "times the throughput", at_once, serial, goal, **details))


def _model(name: str, seconds: float, prefetch: int) -> Model:
    settings = {"prefetch": prefetch, "read_only_inputs": True}
    x, y = tensor("x", "float32", -1), tensor("y", "float32", -1)
    kwargs = {"seconds": seconds}
    return Model(name, "device_models.py:Echo", [x], [y], array="cupy", kwargs=kwargs, settings=settings)


def _rate(one: RunningServer, clients: LoadClients, case: tuple[str, int, int], effort: Effort) -> float:
    """Requests a second to a model of so many bytes, so many of them under way."""
    model, nbytes, in_flight = case
    with calling(one) as caller, host_requests(caller, model, nbytes, in_flight) as messages:
        return clients.load(one, messages, effort.seconds, f"{model}, {in_flight} under way").answers_per_s


def _name(prefetch: int) -> str:
    return f"prefetch-{prefetch}"
