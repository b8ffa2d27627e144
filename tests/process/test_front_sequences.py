"""A front that dies knows its sequences no more, and the callable is told."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from operated import TIMEOUT_S, OperatedServer

CALLABLES = Path(__file__).resolve().parents[1] / "models" / "sequenced.py"
NUMBER = {"dtype": "int32", "shape": [1]}
MODEL = {
    "name": "sums",
    "callable": f"{CALLABLES}:Sums",
    "inputs": [{"name": "x", **NUMBER}],
    "outputs": [{"name": name, **NUMBER} for name in ("y", "pid", "kept", "dropped")],
    "max_batch_size": 4,
    "sequence_batching": {"max_sequence_idle_us": 60_000_000},
}


def ask(server: OperatedServer, value: int, **parameters: Any) -> dict[str, int] | str:
    """The outputs by name, or the error."""
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    body = json.dumps({"parameters": parameters, "inputs": [tensor]}).encode()
    url = f"http://{server.addresses['HTTP']}/v2/models/sums/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=TIMEOUT_S) as answer:
            return {one["name"]: one["data"][0] for one in json.load(answer)["outputs"]}
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["error"])


def test_a_new_front_begins_with_no_sequence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    server_keys = {"host": "127.0.0.1", "log_format": "json", "lame_duck_s": 0}
    path.write_text(json.dumps({"server": server_keys, "models": [MODEL]}))
    with OperatedServer(path).until_ended() as server:
        before = ask(server, 1, sequence_id="a", sequence_start=True)
        assert isinstance(before, dict)
        server.replace_front()
        lost = ask(server, 1, sequence_id="a")
        assert lost == (
            "sequence a of model 'sums' was lost with the front process that died: it has to begin anew with "
            "a request that has the START flag"
        )
        after = ask(server, 5, sequence_id="b", sequence_start=True)
        assert isinstance(after, dict)
        assert after == {"y": 5, "pid": before["pid"], "kept": 1, "dropped": 1}
