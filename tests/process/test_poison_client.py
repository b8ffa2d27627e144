"""A client whose requests kill workers, beside one whose do not: on a real server with one instance."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import closing
from pathlib import Path

from operated import InBackground, OperatedServer

MORTAL = Path(__file__).resolve().parents[1] / "models" / "mortal.py"
GOOD, POISON = 1.0, -13.0
#: The addresses of the two clients.
GOOD_CLIENT, POISON_CLIENT = "127.0.0.1", "127.0.0.2"
TIMEOUT_S = 60.0


def server(folder: Path) -> OperatedServer:
    model = {
        "name": "m",
        "callable": f"{MORTAL}:Mortal",
        "kwargs": {"directory": str(folder)},
        "inputs": [{"name": "x", "dtype": "float32", "shape": [1]}],
        "outputs": [
            {"name": "y", "dtype": "float32", "shape": [1]},
            {"name": "calls", "dtype": "int64", "shape": [1]},
            {"name": "pid", "dtype": "int64", "shape": [1]},
        ],
        "max_batch_size": 8,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps({"server": {"host": "127.0.0.1", "lame_duck_s": 0}, "models": [model]}))
    return OperatedServer(path)


def asked(operated: OperatedServer, client: str, value: float) -> int:
    """The status of the answer to a request from this address."""
    connection = http.client.HTTPConnection(
        operated.addresses["HTTP"], timeout=TIMEOUT_S, source_address=(client, 0)
    )
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    with closing(connection):
        connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_others_wait_for_no_back_off_that_a_suspect_causes(tmp_path: Path) -> None:
    with server(tmp_path).until_ended() as operated:
        assert asked(operated, POISON_CLIENT, POISON) == 500  # two workers die
        assert asked(operated, GOOD_CLIENT, GOOD) == 200
        for _ in range(2):  # the restart back-off would be 4 s, and then 16 s, with requests refused
            poisoned = InBackground(asked, operated, POISON_CLIENT, POISON)
            slowest_s = 0.0
            while poisoned.is_alive:
                begun = time.monotonic()
                assert asked(operated, GOOD_CLIENT, GOOD) == 200
                slowest_s = max(slowest_s, time.monotonic() - begun)
            assert poisoned.result() == 500
            assert slowest_s < 3.5
            assert asked(operated, GOOD_CLIENT, GOOD) == 200
        assert operated.metric("gpuserve_worker_restarts_total", model="m") == 4
        operated.wait_log("isolated the requests of client 127.0.0.2")
