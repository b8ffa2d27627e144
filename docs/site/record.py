"""Records the session of the README, where no other server is to be seen and no port is taken:

unshare -rn sh -c 'ip link set lo up && exec .venv/bin/python docs/site/record.py'
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from recording.animation import animated
from recording.screens import shown_rows
from recording.session import COLUMNS, ROWS, Session

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "recording.svg"
_MODEL = """from gpuserve.typed import Float32, batch

@batch(max_batch_size=64)
def double(x: Float32) -> Float32:
    return 2 * x
"""
_BODY = """{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}]}"""


def recorded(key_s: float, pause_s: float) -> str:
    """Play the session, and give it as an SVG. Between two keys and after each answer it waits so long."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "double.py").write_text(_MODEL)
        session = Session(Path(folder), _environment(folder), key_s)
        try:
            _play(session, pause_s)
        finally:
            session.close()
    end_s = session.pieces[-1].at_s + 2 * pause_s
    shown = shown_rows(session.pieces, COLUMNS, ROWS, end_s)
    return animated(shown, COLUMNS, ROWS, end_s, "A model is served, asked and looked at")


def _play(session: Session, pause_s: float) -> None:
    session.awaited("$ ")
    session.watched(pause_s / 2)
    session.typed("cat double.py")
    session.watched(pause_s)
    session.typed("gpuserve serve double.py &")
    session.awaited("Ctrl-C stops the server")
    session.watched(pause_s)
    session.typed("")  # a prompt below what the server has written
    session.awaited("$ ")
    session.typed(f"curl -s localhost:8000/v2/models/double/infer -d '{_BODY}'; echo")
    session.awaited("outputs")
    session.watched(pause_s)
    session.typed("gpuserve status")
    session.awaited("cpu#0")
    session.watched(2 * pause_s)
    session.typed("kill %1; wait")
    session.awaited("Done")
    session.watched(pause_s / 4)


def _environment(folder: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    return {"PATH": path, "HOME": folder, "PS1": "$ ", "TERM": "xterm-256color", "LANG": "C.UTF-8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--key-s", type=float, default=0.035)
    parser.add_argument("--pause-s", type=float, default=1.15)
    options = parser.parse_args()
    options.file.write_text(recorded(options.key_s, options.pause_s))


if __name__ == "__main__":
    main()
