"""What a folder of Hugging Face says of its model: the task, the labels, the sizes. Read from its config.json
as it lies there; nothing is imported, nothing is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.runtimes.missing import ModelFileError, library
from gpuserve.runtimes.table import HUB

#: Ends of the names of classes in ``architectures``, the first that fits; "": known and not served.
_BY_END: Final = (
    ("ForImageClassification", "image-classification"),
    ("ForImageClassificationWithTeacher", "image-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForSequenceClassification", "text-classification"),
    ("ForCausalLM", "text-generation"),
    ("LMHeadModel", "text-generation"),
    ("ForCTC", "automatic-speech-recognition"),
    ("ForSpeechSeq2Seq", "automatic-speech-recognition"),
    ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
    ("Model", "feature-extraction"),
)
TASKS: Final = tuple(dict.fromkeys(task for _, task in _BY_END))
#: Keys of configs whose models take no text.
_NOT_TEXT: Final = frozenset({"image_size", "feat_extract_norm", "num_mel_bins", "conv_stride"})
_TEXT_TASKS: Final = frozenset({"text-classification", "token-classification", "feature-extraction"})
_HIDDEN_SIZES: Final = ("hidden_size", "d_model", "n_embd", "dim")


def is_hub_name(file: str) -> bool:
    return file.startswith(HUB)


def model_name(file: str) -> str:
    """What transformers is given: a folder's path, or a name on the hub."""
    return file.removeprefix(HUB)


def shown(file: str) -> str:
    return file if is_hub_name(file) else os.path.basename(os.path.normpath(file))


def config_of(file: str) -> dict[str, Any]:
    """The config.json of a folder, or of a model on the hub.

    Raises:
        ModelFileError: there is none, or it cannot be read.
    """
    path = _from_hub(file) if is_hub_name(file) else os.path.join(file, "config.json")
    if not is_hub_name(file) and not os.path.isdir(file):
        raise ModelFileError(f"there is no folder {file!r}; a name on the hub is written hf:NAME")
    try:
        with open(path, encoding="utf-8") as opened:
            config = json.load(opened)
    except FileNotFoundError:
        raise ModelFileError(
            f"the folder {shown(file)!r} has no config.json, as one of Hugging Face has"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"config.json of {shown(file)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"config.json of {shown(file)!r} is no mapping")
    return config


def task_of(config: Mapping[str, Any], given: str | None, name: str) -> str:
    """The task of a model: as given, or by its ``architectures``.

    Raises:
        ModelFileError: it is not known, or not served.
    """
    if given is not None:
        if given not in TASKS:
            raise ModelFileError(f"task {given!r} is not served; expected one of {', '.join(TASKS)}")
        return given
    architectures = [str(one) for one in config.get("architectures") or ()]
    for architecture in architectures:
        task = next((task for end, task in _BY_END if architecture.endswith(end)), None)
        if task is not None and not (task in _TEXT_TASKS and _NOT_TEXT & config.keys()):
            return task
    named = f"is a {architectures[0]}" if architectures else "does not say its architecture"
    raise ModelFileError(
        f"the model {name!r} {named}, for which no task is known; say kwargs: {{task: …}}, one of "
        + ", ".join(TASKS)
    )


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """The names of the classes, in the order of the model's scores; as transformers, two without a name each
    where nothing is said.
    """
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(int(config.get("num_labels", 2)))]


def hidden_size_of(config: Mapping[str, Any]) -> int:
    """How long the vector of a token is; -1: the config does not say it by a name that is known here."""
    return next((config[key] for key in _HIDDEN_SIZES if isinstance(config.get(key), int)), -1)


def sentence_pooling(file: str) -> tuple[str, bool] | None:
    """How a folder of sentence-transformers makes one vector of a text's tokens, and whether of length 1;
    None: it is no such folder.
    """
    if is_hub_name(file):
        return None
    try:
        with open(os.path.join(file, "modules.json"), encoding="utf-8") as opened:
            kinds = {
                str(one.get("type", "")).rpartition(".")[2]: one.get("path", "") for one in json.load(opened)
            }
        with open(os.path.join(file, kinds["Pooling"], "config.json"), encoding="utf-8") as opened:
            modes = json.load(opened)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return "cls" if modes.get("pooling_mode_cls_token") else "mean", "Normalize" in kinds


def _from_hub(file: str) -> str:
    hub = library("huggingface_hub", "huggingface")
    try:
        return str(hub.hf_hub_download(model_name(file), "config.json"))
    except Exception as error:  # the network, the hub, the name
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelFileError(f"{file!r} cannot be had from the hub: {first}") from error
