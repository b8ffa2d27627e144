"""Requests that fail as often as a client likes, and what the log has of them."""

from __future__ import annotations

import json
from pathlib import Path

from operated import OperatedServer

MODELS = Path(__file__).resolve().parents[1] / "models"


def test_requests_without_memory_for_their_batch_do_not_flood_the_log(tmp_path: Path) -> None:
    model = {
        "name": "m",
        "callable": f"{MODELS / 'echo.py'}:listed",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": name, "dtype": "float32", "shape": [-1]} for name in ("pid", "calls")],
        "max_batch_size": 8,
    }
    settings = {"host": "127.0.0.1", "lame_duck_s": 0, "max_arena_nbytes": 4096}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"server": settings, "models": [model]}))
    with OperatedServer(path).until_ended() as operated:
        for _ in range(20):
            assert operated.infer("m", 1.0, width=12_000).status == 503
        operated.wait_log("over its limit of 4096")
    lines = [one for one in operated.messages() if "over its limit of 4096" in one["msg"]]
    assert len(lines) < 4
