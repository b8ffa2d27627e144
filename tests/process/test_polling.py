"""A server that follows the files of its models: they change, are broken, come and go, under traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_operator import operated
from operated import MODELS
from repositories import Traffic, clients_are_closed, entry
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here

POLLING = {"model_control": "poll", "repository_poll_s": 0.1}


def local(name: str, folder: Path, tag: str) -> dict[str, Any]:
    """An entry whose callable is a file in that folder, with this tag of its own."""
    put(folder, tag)
    return entry(name) | {"callable": f"{folder / 'own.py'}:Own", "kwargs": {}}


def put(folder: Path, tag: str) -> None:
    """Put the file of the callable there, in one step."""
    source = (MODELS / "generations.py").read_text()
    new = folder / "own.new"
    new.write_text(
        f"{source}\n\nclass Own(Tagged):\n    def __init__(self):\n        super().__init__({tag})\n"
    )
    new.rename(folder / "own.py")


def test_files_that_change_are_followed_under_traffic(tmp_path: Path) -> None:
    same, own = entry("same"), local("m", tmp_path, "0.0")
    with operated(tmp_path, own, same, **POLLING) as operator:
        pid = operator.client().infer("same").pid
        with Traffic(operator.client(), "m") as one, Traffic(operator.client("http"), "m") as other:
            put(tmp_path, "1.0")
            for traffic in (one, other):
                traffic.wait_for(1.0)
            put(tmp_path, "1 / 0")
            operator.wait_said("config reload: model m: version 1: instance cpu#0 could not be started")
            operator.write({**own, "max_batch_sise": 4}, same, **POLLING)
            operator.wait_said("the config is not reloaded, and nothing has changed")
            put(tmp_path, "2.0")
            operator.write(own, same, entry("new", 3.0), **POLLING)
            for traffic in (one, other):
                traffic.wait_for(2.0)
        assert (one.errors, other.errors) == ([], [])
        operator.wait_said("config reload: model new is loaded")
        client = operator.client()
        assert (client.infer("new").tag, client.infer("same").pid) == (3.0, pid)
        operator.write(own, same, **POLLING)
        operator.wait_said("config reload: model new is unloaded")
        with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
            client.asked.load_model("m")
        with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
            client.asked.unload_model("m")
        assert operator.said("could not be started") == 1
        operator.write(own, same, model_control="none")
        operator.wait_said('server.model_control is "none" now, it was "poll"')
        put(tmp_path, "4.0")
        operator.reload(own, same, entry("last"), model_control="none")
        operator.wait_said("config reload: model last is loaded")
        assert client.infer("m").tag == 2.0
