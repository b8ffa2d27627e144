"""What inputs cost: every kind is read to its end, and what is over the ceiling is told."""

from __future__ import annotations

import pytest

from benchmarks import costs


def test_costs_over_the_ceiling_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in costs.KINDS.keys() - {"HTTP/1, chunks of 16 KiB", "gRPC, raw tensor"}:
        monkeypatch.delitem(costs.KINDS, kind)
    assert costs.main(["--ceiling", "1000"]) == 0
    assert costs.main(["--ceiling", "0"]) == 1
    said = capsys.readouterr()
    assert "| gRPC, raw tensor | " in said.out
    assert "over the ceiling of 0 ms: gRPC, raw tensor" in said.err


@pytest.mark.thorough
@pytest.mark.parametrize("kind", costs.KINDS)
def test_no_kind_is_out_of_all_measure(kind: str) -> None:
    assert costs.cost_ms(kind, 1) < (1000 if kind.startswith("HTTP/2") else 5000)
