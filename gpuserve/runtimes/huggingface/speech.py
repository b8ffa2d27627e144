"""Speech to text. Sound comes as samples at the rate of the model, or encoded, which ffmpeg reads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpuserve.runtimes.huggingface.libraries import load_pipeline
from gpuserve.runtimes.huggingface.requests import answer_rows, column, declared
from gpuserve.runtimes.huggingface.settings import Settings
from gpuserve.runtimes.missing import ModelFileError

MAX_BATCH_SIZE: Final = 16


class SpeechRecognition:
    """Answers a recording with the text that is spoken in it."""

    def __init__(self, settings: Settings, _config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "automatic-speech-recognition")
        self._rate = self._pipeline.feature_extractor.sampling_rate
        self._read = self._decoded if settings.audio == "encoded" else self._samples
        self._options = dict(settings.options)

    @classmethod
    def declare(cls, settings: Settings, _config: Mapping[str, Any]) -> dict[str, Any]:
        if settings.audio == "encoded":
            if shutil.which("ffmpeg") is None:
                raise ModelFileError("audio: encoded needs the program ffmpeg, which is not installed")
            audio = {"name": "audio", "dtype": "bytes", "shape": [1]}
        else:
            audio = {"name": "audio", "dtype": "float32", "shape": [-1]}
        return declared([audio], [{"name": "text", "dtype": "bytes", "shape": [1]}], MAX_BATCH_SIZE)

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        return answer_rows(requests, self._read, self._run)

    def _run(self, recordings: list[Any]) -> dict[str, NDArray[Any]]:
        given = [{"raw": one, "sampling_rate": self._rate} for one in recordings]
        found = self._pipeline(given, batch_size=len(given), **self._options)
        return {"text": column([one["text"] for one in found])}

    def _samples(self, request: Mapping[str, NDArray[Any]]) -> list[Any]:
        return [np.array(one) for one in request["audio"]]  # torch wants what it may write to

    def _decoded(self, request: Mapping[str, NDArray[Any]]) -> list[Any]:
        from transformers.pipelines.audio_utils import ffmpeg_read

        return [ffmpeg_read(one, self._rate) for one in request["audio"].ravel()]
