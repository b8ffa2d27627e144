"""Another server on the same network, side by side with ours: PyTriton, where it is beside torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.gpu.places import MODELS
from benchmarks.gpu.running.section import Findings, SectionSkipped, Site, ratio_figure
from benchmarks.gpu.served.bare_loop import IN_FLIGHT, network_model, networks_module, size_of
from benchmarks.gpu.served.load import loaded
from benchmarks.gpu.served.messages import with_bytes
from benchmarks.gpu.served.serving import serving
from benchmarks.peers import PeerCache
from benchmarks.servers import Ports, PyTriton, running

_KIND: Final = "encoder"
_BATCHES: Final = (1, 8, 32)
_PROGRAM: Final = MODELS / "pytriton_network.py"


class _GpuPyTriton(PyTriton):
    """PyTriton of this interpreter, with one network on the device."""

    def __init__(self, site: Site) -> None:
        super().__init__(PeerCache(site.folder))
        self._site = site

    def prepare(self) -> None:
        """Nothing is installed."""

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """The program that serves the network."""
        numbers = map(str, (ports.http, ports.grpc, ports.metrics))
        return [sys.executable, str(_PROGRAM), *numbers, _KIND, size_of(self._site), self._site.device]


def run(site: Site, findings: Findings) -> None:
    """See ``section.py``.

    Raises:
        SectionSkipped: there is no peer here.
    """
    if importlib.util.find_spec("pytriton") is None:
        raise SectionSkipped("neither PyTriton nor Triton is installed in this environment")
    networks = networks_module()
    peer = _GpuPyTriton(site)
    ours = network_model(site, _KIND, _KIND)
    with serving(site, "peers", [ours]) as one, running(peer, site.folder / "pytriton", [_KIND]) as other:
        for rows in _BATCHES:
            message = with_bytes(_KIND, {"x": networks.example(_KIND, rows)})
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(site.effort.rounds):
                for server, seen in ((one, mine), (other, theirs)):
                    load = loaded(server, [message] * IN_FLIGHT, site.effort.seconds)
                    seen.append(load.answers_per_s * rows)
            details = {"gpuserve, rows/s": mine, f"{peer.title}, rows/s": theirs}
            case, unit = f"{_KIND}, batch {rows}", f"gpuserve / {peer.title}"
            findings.add(ratio_figure(case, unit, mine, theirs, None, **details))
