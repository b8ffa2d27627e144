"""A wrong keyword of a public callable: the error names what was called, and the nearest keyword."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gpuserve
from gpuserve import Server, client, decorators, model
from gpuserve.api.server import AttachedServer
from gpuserve.compat.pytriton.triton import Triton

BIND = Server().bind
AT = ("localhost", "m")
CONFIG = "config=ModelConfig(max_batch_size=…)"


def double(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("call", "arguments", "called", "keyword", "hint"),
    [
        (BIND, ("m", double), "Server.bind", "isolated", "'isolation'"),
        (BIND, ("m", double), "Server.bind", "max_batch_size", CONFIG),
        (BIND, ("m", double), "Server.bind", "max_batch", CONFIG),
        (AttachedServer("localhost:1").bind, ("m", double), "AttachedServer.bind", "devices", "'device'"),
        (Server().ensemble, ("m", [], []), "Server.ensemble", "step", "'steps'"),
        (Server.attach, ("localhost",), "Server.attach", "timeout", "'timeout_s', in seconds"),
        (gpuserve.ModelConfig, (), "ModelConfig", "max_batch", "'max_batch_size'"),
        (gpuserve.ModelConfig, (), "ModelConfig", "batchin", "'batching'"),
        (
            gpuserve.ModelConfig,
            (),
            "ModelConfig",
            "preferred_batch_size",
            "batcher=DynamicBatcher(preferred_batch_size=…)",
        ),
        (gpuserve.Tensor, ((1,), "int8"), "Tensor", "label", "'labels'"),
        (gpuserve.Tensor, (), "Tensor", "datatype", "'dtype'"),
        (gpuserve.DynamicBatcher, (), "DynamicBatcher", "preferred_batch_sizes", "'preferred_batch_size'"),
        (gpuserve.Step, (), "Step", "models", "'model'"),
        (gpuserve.RateLimiter, (), "RateLimiter", "resource", "'resources'"),
        (gpuserve.Resource, (), "Resource", "names", "'name'"),
        (gpuserve.SequenceBatching, (), "SequenceBatching", "control", "'controls'"),
        (gpuserve.SequenceControl, (), "SequenceControl", "kinds", "'kind'"),
        (model.Batching, (), "Batching", "max_queue_delay", "'max_queue_delay_us', in microseconds"),
        (model.Queue, (), "Queue", "max_nbyte", "'max_nbytes', in bytes"),
        (model.Policy, (), "Policy", "default_timeout", "'default_timeout_us', in microseconds"),
        (model.QueuePolicy, (), "QueuePolicy", "max_queue", "'max_queue_size'"),
        (model.ModelWarmup, (), "ModelWarmup", "batch", "'batch_size'"),
        (model.WarmupInput, (), "WarmupInput", "zero", "'zero_data'"),
        (gpuserve.events, (), "events", "models", "'model'"),
        (decorators.batch, (), "batch", "max_batch", "'max_batch_size'"),
        (client.ModelClient, AT, "ModelClient", "init_timeout", "'init_timeout_s', in seconds"),
        (client.AsyncioModelClient, AT, "AsyncioModelClient", "token", "'access_token'"),
        (client.FuturesModelClient, AT, "FuturesModelClient", "max_worker", "'max_workers'"),
        (Triton, (), "Triton", "configs", "'config'"),
    ],
)
def test_the_error_names_what_was_called_and_the_nearest_keyword(
    call: Callable[..., Any], arguments: tuple[Any, ...], called: str, keyword: str, hint: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call(*arguments, **{keyword: 4})
    expected = f"{called}() got an unexpected keyword argument {keyword!r}; did you mean {hint}?"
    assert str(caught.value) == expected


def test_a_missing_argument_names_what_was_called() -> None:
    with pytest.raises(TypeError, match=r"^Server\.bind\(\) missing 1 required .*'infer_func'$"):
        Server().bind("m")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Step\(\) missing 2 required .*'inputs' and 'outputs'$"):
        gpuserve.Step("m")  # type: ignore[call-arg]


def test_a_type_error_from_inside_the_call_is_unchanged() -> None:
    with pytest.raises(TypeError, match=r"^'int' object is not iterable$"):
        gpuserve.events(kinds=5)  # type: ignore[arg-type]
