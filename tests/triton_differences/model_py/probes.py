"""What is asked of the model ``probe``, of both servers, and the answers as trees that can be compared."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from benchmarks.servers import RunningServer, Server, running
from triton_differences.compare import Verdict, differences, verdict
from triton_differences.expected import meant_by
from triton_differences.model_py.configs import CONFIGS
from triton_differences.model_py.meant import MODEL_PY
from triton_differences.model_py.servers import MODELS
from triton_differences.report import Result

PREFIX: Final = "model.py: "
_TIMEOUT_S: Final = 30.0
#: What a request says besides, by probe.
_SAID: Final[Mapping[str, Mapping[str, Any]]] = {
    "request": {
        "id": "r1",
        "parameters": {"a": 1, "b": "c", "d": True, "sequence_id": 7, "timeout": 9_000_000},
    },
}


def names(pattern: str = "*") -> list[str]:
    """The cases that a pattern chooses: each probe, and the model that completes its configuration."""
    folder = Path(__file__).parent / "repository"
    sources = [(folder / name / "1/model.py").read_text() for name in ("probe", "wrong")]
    methods = re.findall(r"def (?:probe_|(?=execute_))(\w+)", "".join(sources))
    found = [*methods, "completed configuration", *(f"config {name}" for name in CONFIGS)]
    return [one for one in found if fnmatchcase(PREFIX + one, pattern)]


def compared(triton: Server, gpuserve: Server, logs: Path, pattern: str) -> Iterator[Result]:
    """The results of all cases that a pattern chooses."""
    chosen = names(pattern)
    if not chosen:
        return
    with ExitStack() as stack:
        up = [stack.enter_context(running(one, logs, MODELS)) for one in (triton, gpuserve)]
        for name in chosen:
            theirs, ours = (_answer(one, name) for one in up)
            found = list(differences(theirs, ours))
            kind = verdict(found)
            case = PREFIX + name
            meant = meant_by(case, found, MODEL_PY) if kind is Verdict.DIFFERENT else ()
            yield Result(case, kind, found, meant)


def _answer(server: RunningServer, name: str) -> Any:
    if name.startswith("config "):
        model = name.removeprefix("config ")
        answer = _asked(server, f"repository/models/{model}/load", {})
        _asked(server, f"repository/models/{model}/unload", {})
        return {"loaded": not answer}
    if name == "completed configuration":
        config = _asked(server, "models/completed/config", None)
        return {key: config.get(key) for key in ("max_batch_size", "input", "output", "dynamic_batching")}
    model = "wrong" if name.startswith("execute_") else "probe"
    method = name.removeprefix("execute_")
    tensor = {"name": "PROBE", "datatype": "BYTES", "shape": [1], "data": [method]}
    answer = _asked(server, f"models/{model}/infer", {"inputs": [tensor], **_SAID.get(name, {})})
    if "outputs" not in answer:
        # The process of the model may have died, and would be back only some requests later.
        _asked(server, f"repository/models/{model}/load", {})
        return answer
    return {"said": json.loads(answer["outputs"][0]["data"][0])}


def _asked(server: RunningServer, path: str, document: Any) -> Any:
    body = None if document is None else json.dumps(document).encode()
    url = f"http://127.0.0.1:{server.ports.http}/v2/{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": error.read().decode()}
