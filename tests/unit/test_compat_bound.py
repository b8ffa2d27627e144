"""What a model that is bound as with PyTriton comes to, beside one that is bound natively."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve.compat.pytriton.triton import bound_spec
from gpuserve.core.errors import BadModelConfig
from gpuserve.model.declaration import ModelConfig, ModelWarmup, Tensor, WarmupInput
from gpuserve.model.spec import ModelSpec

X = Tensor(name="x", dtype=np.float32, shape=(-1,))
Y = Tensor(name="y", dtype=np.float32, shape=(-1,))
ZEROS = WarmupInput(np.float32, (3,), zero_data=True)
GOOD = ModelWarmup("good", 2, {"x": ZEROS})


async def double(requests: list[Any]) -> list[Any]:
    return [{"y": 2 * request["x"]} for request in requests]


async def triple(requests: list[Any]) -> list[Any]:
    return [{"y": 3 * request["x"]} for request in requests]


def one_at_last(requests: list[Any]) -> Any:
    yield [{"y": request["x"]} for request in requests]


def plain(requests: list[Any]) -> list[Any]:
    return requests


def bound(infer: Callable[..., Any], config: ModelConfig | None = None) -> ModelSpec:
    return bound_spec("m", infer, [X], [Y], 1, config, strict=False, isolation="thread")


@pytest.mark.parametrize("infer", [double, one_at_last])
def test_one_batch_is_under_way_at_once(infer: Callable[..., Any]) -> None:
    assert bound(infer).concurrency == 1
    assert bound(infer, ModelConfig(decoupled=True)).concurrency == 0, "by the kind of the callable"
    assert bound(plain).concurrency == 0


def test_a_callable_asks_for_more() -> None:
    triple.concurrency = 4  # type: ignore[attr-defined]
    assert bound(triple).concurrency == 0, "the worker reads it from the callable"


@pytest.mark.parametrize(
    ("inputs", "batch_size", "meant"),
    [
        ({}, 1, ("bad", 1, 1, ())),
        ({"x": ZEROS}, 5, ("bad", 5, 1, (("x", "FP32", (3,), "zero", ""),))),
        (
            {"x": WarmupInput(np.int32, (3,), zero_data=True)},
            1,
            ("bad", 1, 1, (("x", "INT32", (3,), "zero", ""),)),
        ),
        ({"z": ZEROS}, 1, ("bad", 1, 1, (("z", "FP32", (3,), "zero", ""),))),
        (
            {"x": WarmupInput(np.float32, (3,), input_data_file="/nowhere/x.npy")},
            1,
            ("bad", 1, 1, (("x", "FP32", (3,), "file", "/nowhere/x.npy"),)),
        ),
    ],
    ids=["input left out", "too large", "wrong dtype", "no input of the model", "file missing"],
)
def test_warmups_run_with_what_they_name(inputs: dict[str, Any], batch_size: int, meant: Any) -> None:
    bad = ModelWarmup("bad", batch_size, inputs)
    spec = bound(plain, ModelConfig(max_batch_size=4, model_warmup=[bad, GOOD]))
    assert spec.warmup[0] == meant
    assert spec.warmup[1][0] == "good"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (WarmupInput(np.float32, (3,)), "must be provided"),
        (WarmupInput("float33", (3,), zero_data=True), "float33"),
    ],
    ids=["no data", "no dtype"],
)
def test_warmups_that_cannot_be_are_logged(
    given: WarmupInput, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ModelWarmup("bad", 1, {"x": given})
    spec = bound(plain, ModelConfig(max_batch_size=4, model_warmup=[bad, GOOD]))
    assert [one[0] for one in spec.warmup] == ["good"]
    (record,) = caplog.records
    assert named in record.getMessage()


def test_other_values_of_the_config_still_stop_it() -> None:
    with pytest.raises(BadModelConfig, match="max_batch_size"):
        bound(plain, ModelConfig(max_batch_size=-1, model_warmup=[GOOD]))


def test_the_config_of_the_program_stays_as_it_is(tmp_path: Path) -> None:
    config = ModelConfig(max_batch_size=4, model_warmup=[GOOD])
    before = replace(config)
    bound(plain, config)
    assert config == before
