"""Ensembles of a program's own models: ``Server.ensemble()``."""

from __future__ import annotations

from typing import Any

import pytest
from bound import FLOATS_IN_AND_OUT, ask, free_server

from gpuserve import ModelConfig, Step, Tensor
from gpuserve.core.errors import BadModelConfig, BindError
from gpuserve.decorators import batch

X, Y = Tensor((-1,), "float32", "INPUT_1"), Tensor((-1,), "float32", "y")


@batch
def plus_one(INPUT_1: Any) -> Any:
    return [INPUT_1 + 1]


def twice(model: str = "m", **more: Any) -> list[Step]:
    return [
        Step(model, inputs={"INPUT_1": "INPUT_1"}, outputs={"OUTPUT_1": "t"}, **more),
        Step(model, inputs={"INPUT_1": "t"}, outputs={"OUTPUT_1": "y"}, **more),
    ]


def test_a_program_declares_one_before_its_models_and_while_it_runs() -> None:
    with free_server() as server:
        server.ensemble("e", [X], [Y], twice(), max_batch_size=4)
        server.bind("m", plus_one, **FLOATS_IN_AND_OUT, config=ModelConfig(max_batch_size=4))
        server.run()
        assert ask(server, "e", 1, 2) == [3, 4]
        server.ensemble("later", [X], [Y], twice(version=1), max_batch_size=2)
        assert ask(server, "later", 5) == [7]
        with pytest.raises(
            BadModelConfig, match=r"ensemble 'wrong': steps\[0\].model: there is no model 'n'"
        ):
            server.ensemble("wrong", [X], [Y], twice("n"))
        server.ensemble("later", [X], [Y], twice(), max_batch_size=2)
        assert ask(server, "later", 5) == [7]
        with pytest.raises(BindError, match="names must differ in more than case"):
            server.ensemble("LATER", [X], [Y], twice(), max_batch_size=2)


def test_a_model_that_is_not_bound_is_told_at_the_start() -> None:
    with free_server() as server:
        server.ensemble("e", [X], [Y], twice(), max_batch_size=4)
        with pytest.raises(BadModelConfig, match=r"ensemble 'e': steps\[0\].model: there is no model 'm'"):
            server.run()
