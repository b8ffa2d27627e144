"""What is asked of the model ``probe``, of both servers, and the answers as trees that can be compared."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from benchmarks.servers import Server
from triton_differences.compare import Verdict, differences, verdict
from triton_differences.expected import meant_by
from triton_differences.model_py.configs import CONFIGS
from triton_differences.model_py.meant import MODEL_PY
from triton_differences.model_py.servers import MODELS
from triton_differences.report import Result
from triton_differences.subject import Subject

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
    sources = [(folder / name / "1/model.py").read_text() for name in ("probe", "wrong", "awaits")]
    methods = re.findall(r"def (?:probe_|(?=execute_|awaits_))(\w+)", "".join(sources))
    found = [*methods, "completed configuration", *(f"config {name}" for name in CONFIGS)]
    return [one for one in found if fnmatchcase(PREFIX + one, pattern)]


def compared(triton: Server, gpuserve: Server, logs: Path, pattern: str) -> Iterator[Result]:
    """The results of all cases that a pattern chooses."""
    chosen = names(pattern)
    if not chosen:
        return
    with Subject(triton, logs, MODELS) as one, Subject(gpuserve, logs, MODELS) as other:
        for name in chosen:
            theirs, ours = (_answer(server, name) for server in (one, other))
            found = list(differences(theirs, ours))
            kind = verdict(found)
            case = PREFIX + name
            meant = meant_by(case, found, MODEL_PY) if kind is Verdict.DIFFERENT else ()
            yield Result(case, kind, found, meant)


def _answer(server: Subject, name: str) -> Any:
    if name.startswith("config "):
        model = name.removeprefix("config ")
        answer = _asked(server, f"repository/models/{model}/load", {})
        _asked(server, f"repository/models/{model}/unload", {})
        return {"loaded": not answer}
    if name == "completed configuration":
        config = _asked(server, "models/completed/config", None)
        return {key: config.get(key) for key in ("max_batch_size", "input", "output", "dynamic_batching")}
    model = {"execute": "wrong", "awaits": "awaits"}.get(name.partition("_")[0], "probe")
    method = name.removeprefix("execute_")
    tensor = {"name": "PROBE", "datatype": "BYTES", "shape": [1], "data": [method]}
    answer = _asked(server, f"models/{model}/infer", {"inputs": [tensor], **_SAID.get(name, {})})
    if "outputs" not in answer:
        # The process of the model may have died, and would be back only some requests later.
        _asked(server, f"repository/models/{model}/load", {})
        return answer
    return {"said": json.loads(answer["outputs"][0]["data"][0])}


def _asked(server: Subject, path: str, document: Any) -> Any:
    body = None if document is None else json.dumps(document).encode()
    url = f"http://127.0.0.1:{server.ports.http}/v2/{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": error.read().decode()}
    except (OSError, http.client.HTTPException) as error:
        ended = server.restart_if_ended()
        return {"status": None, "text": "the server ended" if ended else f"{type(error).__name__}: {error}"}
