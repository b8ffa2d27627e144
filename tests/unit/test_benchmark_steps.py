"""The synthetic steps of the benchmarks, and what is read off their record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models.steps import RECORD, Stepped, bare_loop
from benchmarks.steps import overhead_us
from gpuserve import Tensor
from gpuserve.testing import run_callable

INPUTS = [
    Tensor(name="n", dtype=np.int32, shape=(1,)),
    Tensor(name="sent", dtype=np.float64, shape=(1,), optional=True),
]
OUTPUTS = [Tensor(name="left", dtype=np.int32, shape=(1,))]


def test_a_stepped_model_records_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    made = Stepped()
    answers = run_callable(made, {"n": [3], "sent": [0.5]}, inputs=INPUTS, outputs=OUTPUTS)
    assert [int(one["left"][0]) for one in answers] == [2, 1, 0]
    made.close()
    record = json.loads((tmp_path / "record").read_text())
    assert [(active, new) for _, _, active, new in record["steps"]] == [(1, 1), (1, 0), (1, 0)]
    assert all(end - start >= 0.002 for start, end, *_ in record["steps"])
    assert record["joins"] == [[0.5, record["steps"][0][0]]]
    assert [sent for sent, _ in record["releases"]] == [0.5]
    assert overhead_us(record, 1) > 0


def test_a_bare_loop_is_as_fast_as_its_steps() -> None:
    assert 0 < bare_loop([10, 500], 64, 0.05) <= 64 / 0.00328
