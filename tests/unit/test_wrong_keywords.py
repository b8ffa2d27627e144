"""Keywords of public callables: what type checkers know of them, and errors that name the nearest one."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Callable
from typing import Any

import pytest

import gpuserve
from gpuserve import Server, client, decorators, model
from gpuserve.api.server import AttachedServer
from gpuserve.compat.pytriton.triton import Triton
from gpuserve.config.settings.keywords import ServerKeywords
from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.declaration import MEMORIES
from gpuserve.model.options import OptionRow, element, rows
from gpuserve.model.spec import ARRAYS

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


def test_a_missing_argument_names_what_was_called_and_an_error_inside_the_call_is_unchanged() -> None:
    with pytest.raises(TypeError, match=r"^Server\.bind\(\) missing 1 required .*'infer_func'$"):
        Server().bind("m")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Step\(\) missing 2 required .*'inputs' and 'outputs'$"):
        gpuserve.Step("m")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^'int' object is not iterable$"):
        gpuserve.events(kinds=5)  # type: ignore[arg-type]


# ---- keywords for type checkers ----


KEYWORDS = typing.get_type_hints(ServerKeywords)


def flat(hint: Any) -> set[Any]:
    """The types and words that a value may be."""
    if typing.get_origin(hint) is collections.abc.Sequence:
        return {("list", one) for one in flat(typing.get_args(hint)[0])}
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return set(args)
    return {one for part in args for one in flat(part)} if args else {hint}


def meant(row: OptionRow) -> set[Any]:
    inner = element(row.hint)
    words = set(row.option.words)
    found = (
        (words or {inner}) if inner else words | ({row.hint} if row.hint is not str or not words else set())
    )
    found = {("list", one) for one in found} if inner else found
    if typing.get_origin(row.hint) is dict:
        found = set(typing.get_args(row.hint))
    return found | ({str} if row.option.unit else set()) | ({type(None)} if row.has_none else set())


def test_there_are_no_other_keywords_and_words_are_those_of_the_tables() -> None:
    assert KEYWORDS.keys() == rows(ServerSettings).keys()
    assert flat(typing.get_type_hints(gpuserve.Tensor)["memory"]) == {*MEMORIES, type(None)}
    assert set(ARRAYS) == {"numpy", "cupy", "torch"}  # as declare/model.py says it to type checkers
    assert gpuserve.Server(drain_timeout_s="2m").settings.drain_timeout_s == 120


@pytest.mark.parametrize("name", KEYWORDS)
def test_each_takes_what_its_row_takes(name: str) -> None:
    assert flat(KEYWORDS[name]) == meant(rows(ServerSettings)[name])
