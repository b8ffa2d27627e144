"""From a folder of Hugging Face to the class of its task. What a task declares is asked without loading any
weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.runtimes.huggingface.folders import config_of, shown, task_of
from gpuserve.runtimes.huggingface.generation import TextGeneration, WholeTextGeneration
from gpuserve.runtimes.huggingface.images import ImageClassification
from gpuserve.runtimes.huggingface.libraries import EXTRA
from gpuserve.runtimes.huggingface.settings import Settings, settings_of
from gpuserve.runtimes.huggingface.speech import SpeechRecognition
from gpuserve.runtimes.huggingface.texts import FeatureExtraction, TextClassification, TokenClassification
from gpuserve.runtimes.missing import ModelFileError

_CLASSES: Final[dict[str, type[Any]]] = {
    "automatic-speech-recognition": SpeechRecognition,
    "feature-extraction": FeatureExtraction,
    "image-classification": ImageClassification,
    "text-classification": TextClassification,
    "text-generation": TextGeneration,
    "token-classification": TokenClassification,
}


class HuggingFaceModel:
    """Made with a folder, it is an object of the class for the folder's task.

    Args:
        file: the folder, or hf:NAME.
        device: the instance's device.
        kwargs: the other keys of ``Settings``.

    Raises:
        ModelFileError: the folder cannot be served like this.
    """

    def __new__(cls, file: str, device: str = "cpu", **kwargs: Any) -> Any:
        settings, config, chosen = _chosen({"file": file, "device": device, **kwargs})
        return chosen(settings, config)

    @classmethod
    def declare(cls, **kwargs: Any) -> dict[str, Any]:
        """Inputs, outputs and more, as a config file has them; raises ModelFileError."""
        settings, config, chosen = _chosen(kwargs)
        for library in ("torch", "transformers"):
            if importlib.util.find_spec(library) is None:
                raise ModelFileError(
                    f"the Python package {library!r} is not installed; pip install 'gpuserve[{EXTRA}]' "
                    "brings it"
                )
        found: dict[str, Any] = chosen.declare(settings, config)
        return found


def _chosen(kwargs: Mapping[str, Any]) -> tuple[Settings, dict[str, Any], type[Any]]:
    settings = settings_of(kwargs)
    config = config_of(settings.file)
    task = task_of(config, settings.task, shown(settings.file))
    if task == "text-generation" and not settings.stream:
        return settings, config, WholeTextGeneration
    return settings, config, _CLASSES[task]
