"""What a folder of Hugging Face is taken for, by its config.json, and its keyword arguments."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from optional_packages import needs

from gpuserve.backends.huggingface import HuggingFaceModel
from gpuserve.backends.huggingface.model_folders import (
    hidden_size_of,
    labels_of,
    model_settings,
    read_config,
    sentence_pooling,
    task_of,
)
from gpuserve_worker.inference.callable_loading import LoadError


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("DistilBertForSequenceClassification", "text-classification"),
        ("BertForTokenClassification", "token-classification"),
        ("MPNetModel", "feature-extraction"),
        ("GPT2LMHeadModel", "text-generation"),
        ("Qwen2ForCausalLM", "text-generation"),
        ("ViTForImageClassification", "image-classification"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
    ],
)
def test_the_task_follows_from_the_architecture(architecture: str, task: str) -> None:
    assert task_of({"architectures": [architecture]}, None, "m") == task


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, None, "'m' is a T5ForConditionalGeneration"),
        ({}, None, "'m' does not name its architecture"),
        ({"architectures": ["ViTModel"], "image_size": 224}, None, "a ViTModel, for which no task is known"),
        (
            {"architectures": ["Wav2Vec2ForSequenceClassification"], "conv_stride": [5]},
            None,
            "no task is known",
        ),
        ({}, "summarization", "task 'summarization' is not served; expected one of image-classification"),
    ],
)
def test_a_task_that_is_not_served_is_refused(config: dict[str, Any], given: str | None, said: str) -> None:
    with pytest.raises(LoadError) as refused:
        task_of(config, given, "m")
    assert said in str(refused.value)
    assert "text-generation" in str(refused.value)


def test_a_task_that_is_given_wins() -> None:
    assert task_of({"architectures": ["XModel"]}, "text-classification", "m") == "text-classification"


def test_labels_are_in_the_order_of_the_scores() -> None:
    assert labels_of({"id2label": {"10": "c", "2": "b", "0": "a"}}) == ["a", "b", "c"]
    assert labels_of({}) == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize(
    ("config", "size"), [({"n_embd": 7}, 7), ({"dim": 5}, 5), ({"hidden_size": 3, "dim": 5}, 3), ({}, -1)]
)
def test_the_size_of_a_vector_has_several_names(config: dict[str, Any], size: int) -> None:
    assert hidden_size_of(config) == size


def test_a_folder_of_sentence_transformers_says_how_it_pools(tmp_path: Path) -> None:
    assert sentence_pooling(str(tmp_path)) is None
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert sentence_pooling(str(tmp_path)) == ("cls", True)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "is no mapping")]
)
def test_a_folder_without_a_config_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(LoadError, match=said):
        read_config(str(tmp_path))


def test_a_folder_that_is_not_there_may_have_been_meant_as_a_name() -> None:
    with pytest.raises(LoadError, match=r"there is no folder 'org/name'; a name on the hub is written hf"):
        HuggingFaceModel.declare(file="org/name")


@needs("huggingface_hub", "torch", "transformers")
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path, is_cached: bool) -> None:
    if is_cached:
        cached = tmp_path / "hub" / "models--org--name"
        (cached / "snapshots" / "c1").mkdir(parents=True)
        (cached / "snapshots" / "c1" / "config.json").write_text(
            '{"architectures": ["BertForTokenClassification"]}'
        )
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("c1")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
    environment = os.environ | {"HF_ENDPOINT": closed, "HF_HOME": f"{tmp_path}"}
    environment = {key: one for key, one in environment.items() if key != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "gpuserve", "check", "hf:org/name"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if is_cached:
        assert (done.returncode, done.stderr) == (0, "")
        assert "text: BYTES" in done.stdout
    else:
        expected = "'hf:org/name' is not in the cache of the hub, and cannot be downloaded: [Errno 111] "
        assert done.stderr.splitlines() == [f"hf:org/name: {expected}Connection refused"]
        assert done.returncode == 4


@pytest.mark.parametrize("library", ["torch", pytest.param("transformers", marks=needs("torch"))])
def test_a_missing_library_is_named(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        LoadError, match=rf"'{library}' is not installed; pip install 'gpuserve\[huggingface\]'"
    ):
        HuggingFaceModel.declare(file=str(tmp_path))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"file": "f", "max_tokens": 3}, "has no key 'max_tokens' here; expected some of file, device,"),
        ({}, "needs file"),
        ({"file": "f", "pooling": "max"}, "pooling is one of mean, cls, none, got 'max'"),
        ({"file": "f", "batches": 0}, "batches is a number of at least 1, got 0"),
        ({"file": "f", "options": [1]}, "options is a mapping of arguments of the pipeline"),
    ],
)
def test_keyword_arguments_are_checked(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=re.escape(said)):
        model_settings(kwargs)


@needs("transformers", "torch")
@pytest.mark.thorough
def test_a_pipeline_with_shared_weights_has_its_model_on_the_device(tmp_path: Path) -> None:
    """A second name of the CPU stands for a GPU."""
    import tiny_models
    import torch

    from gpuserve.backends.huggingface.model_folders import ModelSettings, load_pipeline

    tiny_models.text_classifier(tmp_path / "mood")
    plain, shared = (
        load_pipeline(ModelSettings(str(tmp_path / "mood"), **kwargs), "text-classification")
        for kwargs in ({}, {"device": "cpu:0", "shared_weights": True})
    )
    assert shared.device == torch.device("cpu:0")
    (answer,), (expected,) = shared("good"), plain("good")
    assert answer["label"] == expected["label"]
    assert answer["score"] == pytest.approx(expected["score"], abs=1e-5)
