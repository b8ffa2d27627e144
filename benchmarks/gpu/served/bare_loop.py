"""A network of ``models/networks.py`` behind the server, and in a bare loop in this process: the two that are
compared. torch is imported with the first ``BareLoop``.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

from benchmarks.gpu.running.section import SectionFailed, SectionSkipped, Site, ratio_figure
from benchmarks.gpu.served.calls import calling
from benchmarks.gpu.served.load import LoadClients
from benchmarks.gpu.served.messages import answer_array, with_bytes
from benchmarks.gpu.served.serving import Model, tensor
from benchmarks.scenarios.figures import Figure, Goal
from benchmarks.servers import RunningServer

#: Requests under way: one computes, one waits in the worker, the others are on their way.
IN_FLIGHT: Final = 8
_WARM_UPS: Final = 5
#: Between different kernels for the same network; a wrong answer is far off.
_TOLERANCE: Final = 1e-2


def networks_module() -> Any:
    """The models, which import torch.

    Raises:
        SectionSkipped: it is not installed.
    """
    try:
        from benchmarks.gpu.models import networks
    except ImportError as error:
        raise SectionSkipped(f"torch cannot be imported ({error})") from None
    return networks


def network_model(site: Site, name: str, kind: str, count: int = 1, *, merge: bool = False) -> Model:
    """A network as a model of a server, with so many instances on the one device."""
    networks = networks_module()
    x = networks.example(kind, 1)
    features = {"mlp": networks.MLP_FEATURES, "minilm": networks.SENTENCE_FEATURES}
    return Model(
        name,
        "networks.py:Network",
        inputs=[tensor("x", x.dtype.name, *x.shape[1:])],
        outputs=[tensor("y", "float32", features.get(kind, networks.ENCODER_FEATURES))],
        device=site.device,
        count=count,
        max_batch_size=256,
        merge=merge,
        array="torch",
        kwargs={"kind": kind, "size": size_of(site)},
    )


def size_of(site: Site) -> str:
    """Of the networks."""
    return "small" if site.stand_in else "full"


class BareLoop:
    """The network in this process, without a server."""

    def __init__(self, site: Site, kind: str) -> None:
        import torch

        networks = networks_module()
        self.kind = kind
        self._torch = torch
        self._network = networks.Network(kind, size_of(site), site.device)
        self._device = site.device
        self._example = networks.example

    def example(self, rows: int) -> Any:
        """An input of so many rows."""
        return self._example(self.kind, rows)

    def answer(self, x: Any) -> Any:
        """One batch: to the device, through the network, and back."""
        return self._network.forward(self._torch.from_numpy(x).to(self._device)).cpu().numpy()

    def rate(self, x: Any, seconds: float) -> float:
        """Batches a second."""
        for _ in range(_WARM_UPS):
            self.answer(x)
        count, began_at = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began_at) < seconds or not count:
            self.answer(x)
            count += 1
        return count / took_s if took_s else 0.0


def compare(
    site: Site, one: RunningServer, clients: LoadClients, loop: BareLoop, rows: int, goal: Goal | None
) -> Figure:
    """Rows a second of the server against the loop, with the same batch, in turns.

    Raises:
        SectionFailed: the server's answer is another one than the loop's.
    """
    x, case = loop.example(rows), f"{loop.kind}, batch {rows}"
    message = with_bytes(loop.kind, {"x": x})
    check_answer(one, loop, x)
    server, bare, latencies_ms = [], [], []
    for _ in range(site.effort.rounds):
        seen = clients.load(one, [message] * IN_FLIGHT, site.effort.seconds, case)
        server.append(seen.answers_per_s * rows)
        latencies_ms.append(seen.median_latency_s * 1e3)
        bare.append(loop.rate(x, site.effort.seconds) * rows)
    site.say(f"{case}: {median(server):.0f} and {median(bare):.0f} rows/s")
    details = {"server, rows/s": server, "bare loop, rows/s": bare, "latency, ms": latencies_ms}
    return ratio_figure(case, "server / bare loop", server, bare, goal, **details)


def check_answer(one: RunningServer, loop: BareLoop, x: Any) -> None:
    """The server's answer is the loop's.

    Raises:
        SectionFailed: it is another one.
    """
    wanted = loop.answer(x)
    with calling(one) as caller:
        answer = caller.infer(with_bytes(loop.kind, {"x": x}))
    try:
        given = answer_array(answer, "y", "float32")
    except (KeyError, ValueError) as error:
        raise SectionFailed(f"{loop.kind}, batch {len(x)}: the answer cannot be read: {error}") from None
    apart = abs(given - wanted).max() if given.shape == wanted.shape else float("inf")
    if not apart <= _TOLERANCE:
        text = f"{loop.kind}, batch {len(x)}: the server's answer is {apart:.3g} away from the loop's"
        raise SectionFailed(text)
