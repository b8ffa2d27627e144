"""Sentence embeddings: sentences a second through the server against a bare loop over batches of 64.

The network has the architecture of all-MiniLM-L6-v2 (6 layers, 384 features, 12 heads, 1536 inside) in plain
torch with random weights, for machines that can fetch none; sentences come as tokens. Its speed depends on
neither.
"""

from __future__ import annotations

from typing import Final

from benchmarks.figures import Goal
from benchmarks.gpu.running.section import Findings, Site, ratio_figure
from benchmarks.gpu.served.client import with_bytes
from benchmarks.gpu.served.load import load_clients
from benchmarks.gpu.served.serving import BareLoop, compare, network_model, networks_module, serving

_KIND: Final = "minilm"
_SINGLE: Final = "minilm-single"
_BATCH: Final = 64
_GOAL: Final = Goal(0.97, at_least=True)


def run(site: Site, findings: Findings) -> None:
    networks_module()
    findings.note(
        "The architecture of all-MiniLM-L6-v2 in plain torch with random weights, 64 tokens a "
        "sentence, FP32; sentences come as tokens"
    )
    models = [network_model(site, _KIND, _KIND), network_model(site, _SINGLE, _KIND, merge=True)]
    with load_clients(findings) as clients, serving(site, "sentences", models) as one:
        loop = BareLoop(site, _KIND)
        rows = 4 if site.stand_in else _BATCH
        findings.add(compare(site, one, clients, loop, rows, _GOAL))
        x, message = loop.example(rows), with_bytes(_SINGLE, {"x": loop.example(1)})
        server, bare = [], []
        case = f"minilm, single sentences, {2 * rows} under way"
        for _ in range(site.effort.rounds):
            server.append(clients.load(one, [message] * 2 * rows, site.effort.seconds, case).answers_per_s)
            bare.append(loop.rate(x, site.effort.seconds) * rows)
        details = {"server, rows/s": server, "bare loop, rows/s": bare}
        findings.add(ratio_figure(case, "server / bare loop", server, bare, None, **details))
