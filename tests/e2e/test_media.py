"""Functions whose inputs and outputs are images and sound, asked with files and with tensors."""

from __future__ import annotations

import functools
import http.server
import io
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from browser import chromium
from config_file import write_config
from PIL import Image
from pydantic import BaseModel
from serving import GPUSERVE, JSON_LOG, REPOSITORY, Addresses, serving
from test_browser_and_file_requests import ask

from gpuserve.model.signature import SignatureError, signature_of
from gpuserve.typed import Image as TypedImage
from gpuserve.typed import batch, sample

try:
    import soundfile
except (ImportError, OSError):  # not installed, or without the library of sound files
    soundfile = None


class Settings(BaseModel):
    """Settings of a factory."""


MODELS = REPOSITORY / "tests" / "models" / "media.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    folder: Path = tmp_path_factory.mktemp("media")
    names = ("thumbnails", "means", "bills", *(("louder",) if soundfile else ()))
    entries: list[dict[str, Any]] = [{"name": name, "callable": f"{MODELS}:{name}"} for name in names]
    entries[1] |= {
        "max_batch_size": 4,
        "batching": {"max_queue_delay_us": 60_000_000, "preferred_batch_sizes": [4]},
    }
    with serving(GPUSERVE, "serve", str(write_config(folder, entries))) as addresses:
        yield addresses


def picture(color: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("L", (4, 2), color).save(out, kind)
    return out.getvalue()


def test_an_image_is_decoded_and_the_answer_is_png(server: Addresses) -> None:
    sent = picture(200, "JPEG")
    path = "/v2/models/thumbnails/infer"
    status, _, body = ask(server.http, path, sent, content_type="image/jpeg", accept="image/png")
    assert status == 200, body
    with Image.open(io.BytesIO(body)) as found:
        assert (found.format, found.mode, found.size) == ("PNG", "L", (2, 1))
        assert found.getpixel((0, 0)) == pytest.approx(200, abs=2)


def means(server: Addresses, *files: bytes) -> tuple[np.ndarray, np.ndarray]:
    with tritonclient.http.InferenceServerClient(server.http) as client:
        photo = tritonclient.http.InferInput("photo", [len(files), 1], "BYTES")
        photo.set_data_from_numpy(np.array([[one] for one in files], np.object_))
        result = client.infer("means", [photo])
        return result.as_numpy("small"), result.as_numpy("mean")


def test_a_bad_image_fails_its_own_request_of_a_batch(server: Addresses) -> None:
    with ThreadPoolExecutor(3) as pool:
        good, bad, alone = (
            pool.submit(means, server, *files)
            for files in ([picture(10), picture(30)], [b"GIF89a"], [picture(50)])
        )
        small, mean = good.result()
        assert mean.tolist() == [[10], [30]]
        assert [Image.open(io.BytesIO(one)).size for one in small[:, 0]] == [(4, 2)] * 2
        assert alone.result()[1].tolist() == [[50]]
        text = "input 'photo' must be an image that PIL can read, given 6 bytes"
        with pytest.raises(tritonclient.http.InferenceServerException, match=text):
            bad.result()


@pytest.mark.skipif(soundfile is None, reason="needs soundfile and libsndfile")
def test_sound_is_decoded_and_encoded(server: Addresses) -> None:
    sent, wave = io.BytesIO(), np.float32([[0.25, -0.125], [0.0, 0.5]])
    soundfile.write(sent, wave, 8000, "FLOAT", format="WAV")
    path = "/v2/models/louder/infer"
    status, _, body = ask(server.http, path, sent.getvalue(), content_type="audio/wav", accept="audio/wav")
    assert status == 200, body
    found, rate = soundfile.read(io.BytesIO(body), dtype="float32")
    assert rate == 8000
    np.testing.assert_allclose(found, np.clip(wave * 2, -1, 1), atol=1e-4)
    status, _, body = ask(server.http, path, b"RIFF", content_type="audio/wav")
    assert (status, b"must be sound that soundfile can read" in body) == (400, True)


def test_json_is_an_object_of_pydantic(server: Addresses) -> None:
    form = '--B\r\nContent-Disposition: form-data; name="order"\r\n\r\n{}\r\n--B--'
    path, kind = "/v2/models/bills/infer", "multipart/form-data; boundary=B"
    sent = '{"item": "schön", "counts": [1, 2]}'
    status, _, body = ask(server.http, path, form.format(sent).encode(), content_type=kind)
    assert status == 200, body
    assert json.loads(json.loads(body)["outputs"][0]["data"][0]) == {"item": "schön", "total": 3}
    sent = '{"item": "a", "counts": [1, "b"]}'
    status, _, body = ask(server.http, path, form.format(sent).encode(), content_type=kind)
    text = (
        "'order' must be the JSON of Order that pydantic can read, given 33 bytes: counts.1: Input should be"
    )
    assert (status, text in json.loads(body)["error"]) == (400, True), body


def test_json_is_described_and_taken_as_an_object_by_generate(server: Addresses) -> None:
    status, _, body = ask(server.http, "/openapi.json", method="GET")
    schemas = json.loads(body)["components"]["schemas"]
    taken, returned = (schemas[f"bills.{kind}.0"]["contentSchema"] for kind in ("input", "output"))
    assert (taken["required"], returned["required"]) == (["item", "counts"], ["item", "total"])
    sent = {"order": {"item": "schön", "counts": [1, 2]}}
    status, _, body = ask(server.http, "/v2/models/bills/generate", json.dumps(sent).encode())
    assert status == 200, body
    assert json.loads(json.loads(body)["OUTPUT_1"]) == {"item": "schön", "total": 3}


@pytest.mark.thorough
def test_the_page_of_the_how_to_in_a_browser(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/how-to/requests.md").read_text().partition("## Send images and other files")[2]
    code, config, page = (
        re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml", "html")
    )
    site = tmp_path / "site"
    site.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as origin:
        threading.Thread(target=origin.serve_forever).start()
        try:
            address = f"localhost:{origin.server_port}"
            (tmp_path / "thumbnail.py").write_text(code)
            (tmp_path / "config.yaml").write_text(config.replace("localhost:8080", address))
            (tmp_path / "photo.png").write_bytes(large_picture())
            (tmp_path / "wrong.png").write_bytes(b"no picture")
            with (
                serving(GPUSERVE, "serve", str(tmp_path / "config.yaml"), *JSON_LOG) as server,
                chromium(tmp_path / "profile") as browser,
            ):
                (site / "index.html").write_text(page.replace("localhost:8000", server.http))
                browser.driver.get(f"http://{address}/")
                browser.find("#file").send_keys(str(tmp_path / "photo.png"))
                browser.wait(lambda: browser.run("return picture.naturalWidth"))
                size = "return [picture.naturalWidth, picture.naturalHeight, error.value]"
                assert browser.run(size) == [64, 32, ""]
                browser.find("#file").send_keys(str(tmp_path / "wrong.png"))
                browser.wait(lambda: browser.run("return error.value"))
                assert "must be an image that PIL can read" in browser.run("return error.value")
        finally:
            origin.shutdown()


def large_picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (640, 320), (200, 0, 0)).save(out, "PNG")
    return out.getvalue()


def test_the_form_must_be_that_of_the_decorator() -> None:
    @batch
    def one(photo: TypedImage) -> TypedImage: ...

    @sample
    def many(photo: TypedImage) -> list[TypedImage]: ...

    for function, where in ((one, "'photo' of one"), (many, "'return' of many")):
        with pytest.raises(SignatureError, match=f"{where} .* below @batch it is a list"):
            signature_of(function, function.__name__)


def test_a_model_of_pydantic_is_no_tensor_without_a_decorator() -> None:
    def factory(settings: Settings, also: list[Settings]) -> Settings: ...

    assert signature_of(factory, "factory") is None
