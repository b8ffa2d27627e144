"""An MLP and a transformer encoder in torch: rows a second through the server, with whole batches as
requests, against a bare loop in one process that copies the same batch to the device, calls the network and
copies back.

No two requests share a batch here, so both run the same batches. Both have the GPU to themselves in turns.
"""

from __future__ import annotations

from typing import Final

from benchmarks.figures import Goal
from benchmarks.gpu.running.section import Findings, Site
from benchmarks.gpu.served.load import load_clients
from benchmarks.gpu.served.serving import BareLoop, compare, network_model, networks_module, serving

_BATCHES: Final = (1, 8, 32, 128, 256)
_SMALL_BATCHES: Final = (1, 4)
_GOAL: Final = Goal(0.97, at_least=True)
_KINDS: Final = ("mlp", "encoder")


def run(site: Site, findings: Findings) -> None:
    networks_module()
    findings.note(
        "FP32, random weights, torch's defaults. mlp: 8 linear layers, 8192 wide. encoder: 6 layers of 512 "
        "features on 128 tokens. The bare loop copies the batch to the device, calls the network, copies back"
    )
    models = [network_model(site, kind, kind) for kind in _KINDS]
    with load_clients(findings) as clients, serving(site, "networks", models) as one:
        for kind in _KINDS:
            loop = BareLoop(site, kind)
            for rows in _SMALL_BATCHES if site.stand_in else _BATCHES:
                findings.add(compare(site, one, clients, loop, rows, _GOAL))
