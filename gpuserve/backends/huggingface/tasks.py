"""Tasks of transformers with one answer for each row: classes of texts, tokens and images, vectors of texts,
and speech to text.

Each class reads the rows of a batch of requests, calls the pipeline of transformers once, and splits the
results.
"""

from __future__ import annotations

import abc
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.backends.huggingface.model_folders import (
    EXTRA,
    ModelSettings,
    hidden_size_of,
    labels_of,
    load_pipeline,
    sentence_pooling,
)
from gpuserve.backends.model_files import ModelFileError, import_library
from gpuserve.core.errors import InvalidArgument

_MAX_TEXTS: Final = 64
_MAX_IMAGES: Final = 32
_MAX_RECORDINGS: Final = 16
_TEXT: Final = {"name": "text", "dtype": "bytes", "shape": [1]}

RowArrays: TypeAlias = Mapping[str, NDArray[Any]]


class RowTask(abc.ABC):
    """A callable that answers each request with its part of what the pipeline returns for the rows of all
    requests. A request whose rows cannot be read fails alone.
    """

    def __call__(self, requests: Sequence[RowArrays]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        values: list[Any] = []
        spans: list[tuple[int, slice]] = []
        for position, request in enumerate(requests):
            try:
                rows = self._read(request)
            except ValueError as error:
                answers[position] = InvalidArgument(str(error))
                continue
            spans.append((position, slice(len(values), len(values) + len(rows))))
            values += rows
        outputs = self._run_pipeline(values) if values else {}
        for position, span in spans:
            answers[position] = {name: array[span] for name, array in outputs.items()}
        return answers

    def _read(self, request: RowArrays) -> list[Any]:
        """Return the rows of a request for the pipeline. Raise ValueError for an invalid row."""
        return read_texts("text", request)

    @abc.abstractmethod
    def _run_pipeline(self, rows: list[Any]) -> dict[str, NDArray[Any]]:
        """Return the outputs for the rows of all requests."""


def read_texts(name: str, request: RowArrays) -> list[str]:
    """Return an input as texts. Raise ValueError if the input is no UTF-8."""
    try:
        return [one.decode() for one in request[name].ravel()]
    except UnicodeDecodeError as error:
        raise ValueError(f"Input {name!r} must be text in UTF-8, but {error}") from None


def bytes_column(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return texts as BYTES, one in each row."""
    column = np.empty((len(values), 1), dtype=object)
    for row, value in enumerate(values):
        column[row, 0] = value.encode() if isinstance(value, str) else value
    return column


def task_declaration(
    inputs: list[Any], outputs: list[Any], max_batch_size: int, **more: Any
) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs, "max_batch_size": max_batch_size, **more}


def _score_arrays(
    found: Sequence[Sequence[Mapping[str, Any]]], labels: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return the best label of each row, its score, and all scores in the order of ``labels``."""
    place = {label: position for position, label in enumerate(labels)}
    scores = np.zeros((len(found), len(labels)), dtype=np.float32)
    for row, classes in enumerate(found):
        for one in classes:
            scores[row, place[one["label"]]] = one["score"]
    best = scores.argmax(axis=1)
    return {
        "label": bytes_column([labels[one] for one in best]),
        "score": np.take_along_axis(scores, best[:, None], axis=1),
        "scores": scores,
    }


def _score_outputs(labels: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"name": "label", "dtype": "bytes", "shape": [1]},
        {"name": "score", "dtype": "float32", "shape": [1]},
        {"name": "scores", "dtype": "float32", "shape": [len(labels)], "labels": list(labels)},
    ]


class TextClassification(RowTask):
    """A callable that answers a text with its class, and the scores of all classes."""

    def __init__(self, settings: ModelSettings, config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "text-classification")
        self._labels = labels_of(config)
        self._options = {"truncation": True, **settings.options, "top_k": None}

    @classmethod
    def declare(cls, _settings: ModelSettings, config: Mapping[str, Any]) -> dict[str, Any]:
        return task_declaration([_TEXT], _score_outputs(labels_of(config)), _MAX_TEXTS)

    def _run_pipeline(self, rows: list[str]) -> dict[str, NDArray[Any]]:
        return _score_arrays(self._pipeline(rows, batch_size=len(rows), **self._options), self._labels)


class TokenClassification(RowTask):
    """A callable that answers a text with its entities, as JSON from transformers."""

    def __init__(self, settings: ModelSettings, _config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "token-classification")
        self._options = {"aggregation_strategy": "simple", **settings.options}

    @classmethod
    def declare(cls, _settings: ModelSettings, _config: Mapping[str, Any]) -> dict[str, Any]:
        return task_declaration([_TEXT], [{"name": "entities", "dtype": "bytes", "shape": [1]}], _MAX_TEXTS)

    def _run_pipeline(self, rows: list[str]) -> dict[str, NDArray[Any]]:
        found = self._pipeline(rows, batch_size=len(rows), **self._options)
        numpy_number = lambda value: value.item()  # noqa: E731
        entities = [json.dumps(one, default=numpy_number, ensure_ascii=False) for one in found]
        return {"entities": bytes_column(entities)}


class FeatureExtraction(RowTask):
    """A callable that answers a text with the vectors of its tokens, their mean, or the first of them."""

    def __init__(self, settings: ModelSettings, config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "feature-extraction")
        self._pooling, self._normalize = _pooling(settings)
        self._options = {"padding": True, "truncation": True, **settings.options}

    @classmethod
    def declare(cls, settings: ModelSettings, config: Mapping[str, Any]) -> dict[str, Any]:
        size = hidden_size_of(config)
        if _pooling(settings)[0] == "none":
            output = {"name": "features", "dtype": "float32", "shape": [-1, size]}
        else:
            output = {"name": "embedding", "dtype": "float32", "shape": [size]}
        return task_declaration([_TEXT], [output], _MAX_TEXTS)

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        answers = super().__call__(requests)
        for one in answers if self._pooling == "none" else ():
            if isinstance(one, dict):  # without the padding of longer texts of other requests
                longest = int(one.pop("counts").max(initial=0))
                is_left = self._pipeline.tokenizer.padding_side == "left"
                start = one["features"].shape[1] - longest if is_left else 0
                one["features"] = one["features"][:, start : start + longest]
        return answers

    def embed(self, requests: list[Any]) -> list[Any]:
        """Return the vectors and token counts of EmbeddingRequests, or errors if they have no texts."""
        from gpuserve.openai import BadRequest, Embeddings

        answers: list[Any] = []
        texts: list[str] = []
        for one in requests:
            try:
                answers.append(slice(len(texts), len(texts) + len(one.texts)))
                texts += one.texts
            except BadRequest as error:
                answers.append(error)
        vectors, counts = self._vectors(texts) if texts else (np.empty((0, 0)), np.empty(0))
        return [
            Embeddings(vectors[one], int(counts[one].sum())) if isinstance(one, slice) else one
            for one in answers
        ]

    def _run_pipeline(self, rows: list[str]) -> dict[str, NDArray[Any]]:
        vectors, counts = self._vectors(rows)
        return {"features": vectors, "counts": counts} if self._pooling == "none" else {"embedding": vectors}

    def _vectors(self, texts: list[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return one vector for each text or padded token, and the texts' token counts."""
        import torch

        pipeline = self._pipeline
        with torch.inference_mode():
            given = pipeline.tokenizer(texts, return_tensors="pt", **self._options).to(pipeline.model.device)
            hidden = pipeline.model(**given).last_hidden_state.float()
            mask = given["attention_mask"].unsqueeze(-1)
            if self._pooling == "cls":
                vectors = hidden[:, 0]
            elif self._pooling == "mean":
                vectors = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            else:
                vectors = hidden * mask
            if self._normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            return vectors.cpu().numpy(), given["attention_mask"].sum(dim=1).cpu().numpy()


def _pooling(settings: ModelSettings) -> tuple[str, bool]:
    """Return how one vector is made, and whether its length is 1: by the settings, or else by the folder."""
    known = sentence_pooling(settings.file) or ("mean", False)
    pooling = settings.pooling or known[0]
    return pooling, known[1] if settings.normalize is None else settings.normalize


class ImageClassification(RowTask):
    """A callable that answers an image with its class, the score of the class, and the scores of all classes.
    Images come encoded (PNG, JPEG and whatever else Pillow reads) or as arrays of bytes.
    """

    def __init__(self, settings: ModelSettings, config: Mapping[str, Any]) -> None:
        self._pillow = import_library("PIL.Image", EXTRA)
        self._pipeline = load_pipeline(settings, "image-classification")
        self._labels = labels_of(config)
        self._has_arrays = settings.image == "array"
        self._options = {**settings.options, "top_k": len(self._labels)}

    @classmethod
    def declare(cls, settings: ModelSettings, config: Mapping[str, Any]) -> dict[str, Any]:
        image: dict[str, Any] = {"name": "image", "dtype": "bytes", "shape": [1]}
        if settings.image == "array":
            image = {"name": "image", "dtype": "uint8", "shape": [-1, -1, 3], "ragged": True}
        return task_declaration([image], _score_outputs(labels_of(config)), _MAX_IMAGES)

    def _run_pipeline(self, rows: list[Any]) -> dict[str, NDArray[Any]]:
        return _score_arrays(self._pipeline(rows, batch_size=len(rows), **self._options), self._labels)

    def _read(self, request: RowArrays) -> list[Any]:
        if self._has_arrays:
            return [self._pillow.fromarray(one) for one in request["image"]]
        return [self._decoded_image(one) for one in request["image"].ravel()]

    def _decoded_image(self, encoded: bytes) -> Any:
        try:
            return self._pillow.open(io.BytesIO(encoded)).convert("RGB")
        except (OSError, SyntaxError, self._pillow.DecompressionBombError) as error:
            is_broken = isinstance(error, OSError | SyntaxError)
            reason = "cannot be decoded" if is_broken else "has too many pixels"
            raise ValueError(
                "Input 'image' must be an encoded image such as PNG or JPEG, but one of "
                f"{len(encoded)} bytes {reason}"
            ) from None


class SpeechRecognition(RowTask):
    """A callable that answers a recording with its text. Encoded sound needs ffmpeg."""

    def __init__(self, settings: ModelSettings, _config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "automatic-speech-recognition")
        self._rate = self._pipeline.feature_extractor.sampling_rate
        self._is_encoded = settings.audio == "encoded"
        self._options = dict(settings.options)

    @classmethod
    def declare(cls, settings: ModelSettings, _config: Mapping[str, Any]) -> dict[str, Any]:
        if settings.audio == "encoded":
            if shutil.which("ffmpeg") is None:
                raise ModelFileError("audio: encoded needs the program ffmpeg, which is not installed")
            audio = {"name": "audio", "dtype": "bytes", "shape": [1]}
        else:
            audio = {"name": "audio", "dtype": "float32", "shape": [-1]}
        return task_declaration([audio], [_TEXT], _MAX_RECORDINGS)

    def _run_pipeline(self, rows: list[Any]) -> dict[str, NDArray[Any]]:
        given = [{"raw": one, "sampling_rate": self._rate} for one in rows]
        found = self._pipeline(given, batch_size=len(given), **self._options)
        return {"text": bytes_column([one["text"] for one in found])}

    def _read(self, request: RowArrays) -> list[Any]:
        if not self._is_encoded:
            return [np.array(one) for one in request["audio"]]  # copies, because torch needs writable arrays
        from transformers.pipelines.audio_utils import ffmpeg_read

        return [ffmpeg_read(one, self._rate) for one in request["audio"].ravel()]
