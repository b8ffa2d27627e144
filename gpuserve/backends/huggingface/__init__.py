"""Models of Hugging Face: a task of transformers in each worker, tensors outside.

::

    model_folders      keyword arguments, config.json of a folder, loading by transformers
    tasks              tasks with one answer for each row: texts, images, speech
    generation         texts written token by token
    text_writer        the model and the tokenizer of generation
    step_rows          rows that join and leave between steps
    tool_calls         tool calls in the text of a model
    structured_outputs JSON by the schema of a request
    prompt_batches     the threads of generation: batches, sampling, decoding
    openai_requests    requests of OpenAI's clients as prompts
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.backends.huggingface.generation import TextGeneration, WholeTextGeneration
from gpuserve.backends.huggingface.model_folders import (
    EXTRA,
    ModelSettings,
    model_settings,
    read_config,
    shown_name,
    task_of,
)
from gpuserve.backends.huggingface.tasks import (
    FeatureExtraction,
    ImageClassification,
    SpeechRecognition,
    TextClassification,
    TokenClassification,
)
from gpuserve.backends.model_files import ModelFileError

__all__ = ["HuggingFaceModel"]

_CLASSES: Final[dict[str, type[Any]]] = {
    "automatic-speech-recognition": SpeechRecognition,
    "feature-extraction": FeatureExtraction,
    "image-classification": ImageClassification,
    "text-classification": TextClassification,
    "text-generation": TextGeneration,
    "token-classification": TokenClassification,
}


class HuggingFaceModel:
    """A factory for the folder's task; ``kwargs`` as ``ModelSettings``. Raises ModelFileError."""

    def __new__(cls, file: str, device: str = "cpu", **kwargs: Any) -> Any:
        settings, config, task_class = _task_class({"file": file, "device": device, **kwargs})
        return task_class(settings, config)

    @classmethod
    def declare(cls, **kwargs: Any) -> dict[str, Any]:
        """Return what a config file may declare, without loading weights. Raise ModelFileError."""
        settings, config, task_class = _task_class(kwargs)
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                raise ModelFileError(
                    f"the Python package {package!r} is not installed; pip install 'gpuserve[{EXTRA}]' "
                    "installs it"
                )
        found: dict[str, Any] = task_class.declare(settings, config)
        return found


def _task_class(kwargs: Mapping[str, Any]) -> tuple[ModelSettings, dict[str, Any], type[Any]]:
    settings = model_settings(kwargs)
    config = read_config(settings.file)
    task = task_of(config, settings.task, shown_name(settings.file))
    if task == "text-generation" and not settings.stream:
        return settings, config, WholeTextGeneration
    return settings, config, _CLASSES[task]
