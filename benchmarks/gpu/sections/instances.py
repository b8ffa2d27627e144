"""1, 2 and 4 instances of the transformer encoder on one GPU. There is no goal: where one instance keeps the
GPU busy, others cannot add anything; where it waits for its Python, they do.
"""

from __future__ import annotations

from typing import Final

from benchmarks.figures import Figure
from benchmarks.gpu.running.section import Findings, Site
from benchmarks.gpu.served.client import with_bytes
from benchmarks.gpu.served.load import load_clients
from benchmarks.gpu.served.serving import network_model, networks_module, serving

_INSTANCES: Final = (1, 2, 4)
_BATCHES: Final = (1, 8, 64)
_KIND: Final = "encoder"
#: Requests under way for each instance.
_DEPTH: Final = 4


def run(site: Site, findings: Findings) -> None:
    networks = networks_module()
    counts = _INSTANCES[:2] if site.stand_in else _INSTANCES
    models = [network_model(site, _name(count), _KIND, count) for count in counts]
    with load_clients(findings) as clients, serving(site, "instances", models) as one:
        for rows in _BATCHES[:1] if site.stand_in else _BATCHES:
            rates: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(site.effort.rounds):
                for count in counts:
                    message = with_bytes(_name(count), {"x": networks.example(_KIND, rows)})
                    asked, case = [message] * _DEPTH * count, _case(rows, count)
                    seen = clients.load(one, asked, site.effort.seconds, case)
                    rates[count].append(seen.answers_per_s * rows)
            findings.add(*(_figure(rows, count, rates) for count in counts))


def _figure(rows: int, count: int, rates: dict[int, list[float]]) -> Figure:
    ratios = tuple(rate / alone for rate, alone in zip(rates[count], rates[1], strict=True))
    return Figure(_case(rows, count), "times one instance", ratios, None, {"rows/s": tuple(rates[count])})


def _case(rows: int, count: int) -> str:
    return f"encoder, batch {rows}, {count} instance{'s' * (count > 1)}"


def _name(count: int) -> str:
    return f"encoder-{count}"
