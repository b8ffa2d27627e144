"""A notebook: its event loop runs while cells do, cells are run again, and a kernel leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bound import free_server
from serving import REPOSITORY

from gpuserve.client import ModelClient
from gpuserve.typed import Float32, batch

NOTEBOOK = REPOSITORY / "examples" / "notebook" / "serve.ipynb"
TIMEOUT_S = 90.0
EXECUTE = """
import sys

import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
ROW = np.array([[1, 2]], np.float32)


def scaling(factor: float) -> Any:
    @batch(max_batch_size=4)
    def scale(x: Float32) -> Float32:
        return x * np.float32(factor)

    return scale


def test_all_of_it_works_while_an_event_loop_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def cells() -> list[Any]:
        server = free_server()
        server.bind("scale", scaling(2))
        server.run()
        server.run()  # a cell that is run again
        with ModelClient(server.addresses["http"], "scale") as client:
            found = [client.infer_batch(ROW)["OUTPUT_1"].tolist()]
            server.bind("scale", scaling(10))
            found.append(client.infer_batch(ROW)["OUTPUT_1"].tolist())
        told = f"running at {server.addresses['http']}, gRPC {server.addresses['grpc']}"
        assert repr(server).startswith(f"<Server: scale; {told}")
        server.stop()
        return [*found, told]

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as of an interactive Python
    *found, told = asyncio.run(cells())
    assert found == [[[2, 4]], [[10, 20]]]
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.thorough
def test_the_notebook_of_the_examples(tmp_path: Path) -> None:
    output = tmp_path / "executed.ipynb"
    folders = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"), str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(output)],
        env={**os.environ, **folders},
        timeout=TIMEOUT_S,
        check=True,
    )
    cells = json.loads(output.read_text())["cells"]
    shown = [_text(one) for cell in cells for one in cell.get("outputs", ())]
    assert all(one["output_type"] != "error" for cell in cells for one in cell.get("outputs", ()))
    said = "\n".join(shown)
    assert shown[0].startswith("running at http://localhost:")
    assert "<Server: scale; running at http://localhost:" in said
    assert "[[2., 4., 6.]]" in said
    assert "[[10., 20., 30.]]" in said
    assert "[[2., 3.]]" in said
    assert "by a server of this very program: stop() it, or choose another port" in said
    assert shown[-1] == "<Server: scale; not running>"
    html = [one["data"]["text/html"] for cell in cells for one in cell.get("outputs", ()) if "data" in one]
    assert len(html) == 5


def _text(output: Any) -> str:
    text = output["text"] if "text" in output else output["data"]["text/plain"]
    return "".join(text).strip()
