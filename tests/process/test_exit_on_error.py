"""Models that cannot be loaded at the start of a server that is to serve the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from operated import OperatedServer
from processes import wait_until
from repositories import Client, clients_are_closed, entry, write
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here


def lenient(folder: Path, *models: dict[str, Any], **settings: Any) -> OperatedServer:
    """A server whose model "bad" cannot be loaded while a file is there."""
    (folder / "broken").touch()
    bad = entry("bad", broken=str(folder / "broken"))
    path = write(folder / "config.yaml", *models, bad, host="127.0.0.1", exit_on_error=False, **settings)
    return OperatedServer(path)


@pytest.mark.thorough
def test_the_others_are_served_until_it_is_loaded(tmp_path: Path) -> None:
    second = entry("good", 2.0, version=2, broken=str(tmp_path / "broken"))
    with lenient(tmp_path, entry("good"), second).until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        assert client.infer("good").tag == 1.0
        assert (server.status("/v2/health/live"), server.status("/v2/health/ready")) == (200, 400)
        (state,) = [one for one in client.index() if one[0] == "bad"]
        assert state[:3] == ("bad", "1", "UNAVAILABLE")
        assert state[3].endswith("Tagged raised RuntimeError: there are no weights")
        assert "could not be started" not in state[3]
        with pytest.raises(InferenceServerException, match="'bad' has no available versions"):
            client.infer("bad")
        front = server.front
        (tmp_path / "broken").unlink()
        assert client.states("good") == {"1": "READY", "2": "UNAVAILABLE"}
        client.asked.load_model("bad")
        assert server.status("/v2/health/ready") == 400
        client.asked.load_model("good")
        assert client.infer("good").tag == 2.0
        wait_until(lambda: server.status("/v2/health/ready") == 200, "the server is ready")
        assert client.infer("bad").tag == 1.0
        assert server.front == front
        server.replace_front()


def test_it_is_not_missed_where_readiness_asks_for_nothing_or_somebody_took_it_out(tmp_path: Path) -> None:
    with lenient(tmp_path, min_ready_instances=0).until_ended() as server:
        assert server.status("/v2/health/ready") == 200
