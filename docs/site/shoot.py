"""Takes the screenshots of the live page and of ``gpuserve top`` for ``docs/pictures``, in a Chromium without
a screen, of a server with made-up models under a made-up load: scripts/screenshots [FOLDER]
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
sys.path[:0] = [str(REPOSITORY / "tests")]

from browser import Browser, chromium  # noqa: E402
from rich.console import Console, Group  # noqa: E402
from serving import GPUSERVE, serving  # noqa: E402

from gpuserve.cli.live.event_client import EventStream, chosen_kinds  # noqa: E402
from gpuserve.cli.live.top_screen import Screen  # noqa: E402
from gpuserve.core.event_log import EventKind  # noqa: E402

#: So long the load runs before the first picture: plots should have something to show.
LOAD_S = 80.0

MODELS = """
import os, time
import numpy as np
from gpuserve.decorators import batch

@batch
def embed(text):
    time.sleep(0.004 + 0.0005 * len(text))
    return {"embedding": np.ones((len(text), 8), np.float32)}

@batch
def classify(image):
    time.sleep(0.012)
    return {"scores": np.ones((len(image), 3), np.float32)}

@batch
def rerank(query, passage):
    time.sleep(0.03)
    if b"poison" in query:
        os._exit(1)
    return {"score": np.ones((len(query), 1), np.float32)}
"""


def tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape)}


def config(folder: Path) -> Path:
    (folder / "models.py").write_text(MODELS)
    two = [{"device": "cpu", "count": 2}]
    models: list[dict[str, Any]] = [
        {"name": "embeddings", "callable": "models.py:embed", "max_batch_size": 32, "instances": two,
         "inputs": [tensor("text", "string", 1)], "outputs": [tensor("embedding", "float32", 8)]},
        {"name": "image-classifier", "callable": "models.py:classify", "max_batch_size": 8,
         "inputs": [tensor("image", "float32", 4)], "outputs": [tensor("scores", "float32", 3)]},
        {"name": "reranker", "callable": "models.py:rerank", "max_batch_size": 4, "instances": two,
         "inputs": [tensor("query", "string", 1), tensor("passage", "string", 1)],
         "outputs": [tensor("score", "float32", 1)]},
    ]  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(
        json.dumps({"server": {"name": "gpuserve", "lame_duck_s": 0, "log_format": "json"}, "models": models})
    )
    return path


class Client(NamedTuple):
    """Somebody who asks a model again and again, with a pause of so many seconds on average."""

    model: str
    inputs: list[dict[str, Any]]
    pause_s: float


def text(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}


IMAGE = {"name": "image", "shape": [1, 4], "datatype": "FP32", "data": [0.1, 0.2, 0.3, 0.4]}
CLIENTS = (
    *(Client("embeddings", [text("text", "a sentence")], 0.02) for _ in range(6)),
    *(Client("image-classifier", [IMAGE], 0.08) for _ in range(3)),
    *(Client("reranker", [text("query", "why"), text("passage", "because")], 0.15) for _ in range(2)),
    Client("reranker", [text("passage", "nothing asked")], 3.0),
)


@contextlib.contextmanager
def load(address: str) -> Iterator[None]:
    ends = threading.Event()

    def ask(client: Client) -> None:
        body = json.dumps({"inputs": client.inputs})
        while not ends.wait(random.expovariate(1 / client.pause_s) * (1.6 + random.random())):
            with contextlib.suppress(OSError, http.client.HTTPException):
                post(address, client.model, body)

    threads = [threading.Thread(target=ask, args=(client,)) for client in CLIENTS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def post(address: str, model: str, body: str) -> None:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", body)
        connection.getresponse().read()


class Shot(NamedTuple):
    """A picture: what is opened, on what screen, and by which file it goes."""

    name: str
    view: str
    width: int
    height: int
    dark: bool = False
    mobile: bool = False


SHOTS = (
    Shot("live-page.png", "#/", 1120, 1020),
    Shot("live-page-dark.png", "#/models/embeddings/1", 1120, 1060, dark=True),
    Shot("live-page-phone.png", "#/", 390, 1180, mobile=True),
)


def shoot(browser: Browser, address: str, shot: Shot, folder: Path) -> None:
    browser.emulate(shot.width, shot.height, dark=shot.dark, mobile=shot.mobile)
    browser.open(address, shot.view)
    if "models/" in shot.view:
        browser.wait(lambda: browser.count("button.send"))
        browser.find("button.send").click()
        browser.wait(lambda: "200 OK" in browser.text(".status"))
    time.sleep(2.5)
    browser.run("document.activeElement.blur(); scrollTo(0, 0)")
    path = folder / shot.name
    browser.driver.save_screenshot(str(path))
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


def draw_top(address: str, folder: Path) -> None:
    """Draw the screen of ``gpuserve top`` as an SVG, after a few samples."""
    screen = Screen()
    with EventStream(address, chosen_kinds(()) | {EventKind.SAMPLE}, past=True) as stream:
        ends = time.monotonic() + 4
        while (left := ends - time.monotonic()) > 0:
            if (event := stream.next(left)) is not None:
                screen.add_event(event)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, file=nowhere, width=110, height=20, force_terminal=True)
        console.print(Group(*screen.lines(console.width, console.height)), end="")
        path = folder / "top.svg"
        console.save_svg(str(path), title="gpuserve top")
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else PICTURES
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(chromium(scratch / "profile"))
        addresses = stack.enter_context(serving(GPUSERVE, "serve", str(config(scratch))))
        stack.enter_context(load(addresses.http))
        time.sleep(LOAD_S * 0.7)
        poison = [text("query", "poison"), text("passage", "")]
        with contextlib.suppress(OSError, http.client.HTTPException):
            post(addresses.http, "reranker", json.dumps({"inputs": poison}))
        time.sleep(LOAD_S * 0.3)
        draw_top(addresses.http, folder)
        for shot in SHOTS:
            shoot(browser, addresses.http, shot, folder)


if __name__ == "__main__":
    main()
