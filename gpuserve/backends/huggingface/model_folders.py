"""Model folders of Hugging Face: the keyword arguments of a model, what its config.json declares, and loading
by transformers.

config.json is read without importing or loading anything. Folders are loaded without any network access.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from gpuserve.backends.model_files import ModelFileError, import_library, load_once, threads_per_instance
from gpuserve.backends.registry import HUB

#: The tasks, and the suffixes of class names in ``architectures``. The first match counts.
TASKS: Final = {
    "image-classification": ("ForImageClassification", "ForImageClassificationWithTeacher"),
    "token-classification": ("ForTokenClassification",),
    "text-classification": ("ForSequenceClassification",),
    "text-generation": ("ForCausalLM", "LMHeadModel"),
    "automatic-speech-recognition": ("ForCTC", "ForSpeechSeq2Seq", "WhisperForConditionalGeneration"),
    "feature-extraction": ("Model",),
}
#: Keys of configs of models that do not take texts.
_NOT_TEXT_KEYS: Final = frozenset({"image_size", "feat_extract_norm", "num_mel_bins", "conv_stride"})
_TEXT_TASKS: Final = frozenset({"text-classification", "token-classification", "feature-extraction"})
EXTRA: Final = "huggingface"
_HIDDEN_SIZES: Final = ("hidden_size", "d_model", "n_embd", "dim")


def shown_name(file: str) -> str:
    return file if file.startswith(HUB) else os.path.basename(os.path.normpath(file))


def read_config(file: str) -> dict[str, Any]:
    """Return the config.json of a folder or hub model. Raise ModelFileError if it is unreadable."""
    if file.startswith(HUB):
        path = _downloaded_config(file)
    elif os.path.isdir(file):
        path = os.path.join(file, "config.json")
    else:
        raise ModelFileError(f"there is no folder {file!r}; a name on the hub is written hf:NAME")
    try:
        with open(path, encoding="utf-8") as opened:
            config = json.load(opened)
    except FileNotFoundError:
        raise ModelFileError(
            f"the folder {shown_name(file)!r} has no config.json, as one of Hugging Face has"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"config.json of {shown_name(file)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"config.json of {shown_name(file)!r} is no mapping")
    return config


def _downloaded_config(file: str) -> str:
    hub = import_library("huggingface_hub", "huggingface")
    name = file.removeprefix(HUB)
    unreachable = None
    try:
        # One request: a download tries again for half a minute if there is no network.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
    except Exception as error:  # the network, the hub or the name
        unreachable = error
    try:
        return str(hub.hf_hub_download(name, "config.json", local_files_only=unreachable is not None))
    except Exception as error:
        reason = unreachable or error
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        text = f"{file!r} is not in the cache of the hub, and cannot be downloaded: {first}"
        raise ModelFileError(text) from reason


def task_of(config: Mapping[str, Any], given: str | None, name: str) -> str:
    """Return the task, ``given`` or by ``architectures``; raise ModelFileError unless it is served."""
    if given is not None:
        if given not in TASKS:
            raise ModelFileError(f"task {given!r} is not served; expected one of {', '.join(TASKS)}")
        return given
    architectures = [str(one) for one in config.get("architectures") or ()]
    for architecture in architectures:
        task = next((task for task, suffixes in TASKS.items() if architecture.endswith(suffixes)), None)
        if task is not None and not (task in _TEXT_TASKS and _NOT_TEXT_KEYS & config.keys()):
            return task
    named = f"is a {architectures[0]}" if architectures else "does not name its architecture"
    raise ModelFileError(
        f"the model {name!r} {named}, for which no task is known; set kwargs: {{task: …}}, one of "
        + ", ".join(TASKS)
    )


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes in the order of the model's scores. Without names, the classes have the
    names that transformers gives them. Without a number, there are two.
    """
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(int(config.get("num_labels", 2)))]


def hidden_size_of(config: Mapping[str, Any]) -> int:
    """Return the length of a token's vector, or -1 if the config has it under no known name."""
    return next((config[key] for key in _HIDDEN_SIZES if isinstance(config.get(key), int)), -1)


def sentence_pooling(file: str) -> tuple[str, bool] | None:
    """Return a sentence-transformers folder's pooling, and whether vectors have the length 1, or None."""
    if file.startswith(HUB):
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


_CHOICES: Final = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "pooling": ("mean", "cls", "none"),
    "image": ("encoded", "array"),
    "audio": ("samples", "encoded"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings:
    """The keyword arguments of a model of Hugging Face.

    ``file`` is a folder, or hf:NAME; ``instances`` is the number of workers that share the processors.
    ``pooling`` and ``normalize`` are for feature-extraction; ``image`` and ``audio`` are the form of these
    inputs. With ``shared_weights`` the instances have one copy of the weights. For text-generation,
    ``stream`` is whether each token is a response, ``prompts`` the number of prompts in a batch, and
    ``batches`` the number of batches that run at once. ``options`` go to the pipeline.
    """

    file: str
    device: str = "cpu"
    instances: int = 1
    task: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    shared_weights: bool = False
    pooling: str | None = None
    normalize: bool | None = None
    image: str = "encoded"
    audio: str = "samples"
    stream: bool = True
    prompts: int = 16
    batches: int = 2
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def model_settings(kwargs: Mapping[str, Any]) -> ModelSettings:
    """Return the settings in a model's ``kwargs``. Raise ModelFileError for an invalid key."""
    known = [one.name for one in dataclasses.fields(ModelSettings)]
    unknown = [key for key in kwargs if key not in known]
    if unknown:
        raise ModelFileError(f"kwargs has no key {unknown[0]!r} here; expected some of {', '.join(known)}")
    if not isinstance(kwargs.get("file"), str):
        raise ModelFileError("kwargs needs file, the path of a folder or hf:NAME")
    for key, choices in _CHOICES.items():
        if kwargs.get(key) is not None and kwargs[key] not in choices:
            raise ModelFileError(f"{key} is one of {', '.join(choices)}, got {kwargs[key]!r}")
    for key in ("trust_remote_code", "shared_weights", "normalize", "stream"):
        # A quoted "false" would count as true.
        if not isinstance(kwargs.get(key), bool | None):
            raise ModelFileError(f"{key} is true or false, got {kwargs[key]!r}")
    if kwargs.get("shared_weights") and kwargs.get("trust_remote_code"):
        raise ModelFileError("shared_weights does not go with trust_remote_code: other code cannot be shared")
    for key in ("instances", "prompts", "batches"):
        if key in kwargs and (type(kwargs[key]) is not int or kwargs[key] < 1):
            raise ModelFileError(f"{key} is a number of at least 1, got {kwargs[key]!r}")
    if not isinstance(kwargs.get("options", {}), Mapping):
        raise ModelFileError(f"options is a mapping of arguments of the pipeline, got {kwargs['options']!r}")
    return ModelSettings(**kwargs)


def load_pipeline(settings: ModelSettings, task: str, **components: Any) -> Any:
    """Return the pipeline of a task, with its model on the device. Raise ModelFileError if that fails."""
    # The libraries read these variables on their first import.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not settings.file.startswith(HUB):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = import_library("torch", EXTRA)
    transformers = import_library("transformers", EXTRA)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    if settings.device == "cpu":
        torch.set_num_threads(threads_per_instance(settings.instances))
    is_shared, device = settings.shared_weights, settings.device
    load = partial(
        transformers.pipeline,
        task,
        model=settings.file.removeprefix(HUB),
        device="cpu" if is_shared else device,  # shared weights go to the device by themselves
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code is True,  # None would ask at the terminal
        **components,
    )
    options = task, settings.dtype, sorted(components)
    try:
        pipeline = load_once(load, settings.file, options, is_shared=is_shared, device=device)
    except ModelFileError:
        raise
    except Exception as error:  # a folder may lack anything, and may bring its own code
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelFileError(
            f"{shown_name(settings.file)!r} cannot be loaded for {task}: {type(error).__name__}: {first}"
        ) from error
    pipeline.device = torch.device(device)
    pipeline.model.eval()
    if pipeline.tokenizer is not None:
        if len(pipeline.tokenizer) <= len(pipeline.tokenizer.all_special_ids):
            expected = "expected the files of its tokenizer in the folder"
            raise ModelFileError(f"{shown_name(settings.file)!r} has no vocabulary: {expected}")
        longest = getattr(pipeline.model.config, "max_position_embeddings", None)
        if isinstance(longest, int) and 0 < longest < pipeline.tokenizer.model_max_length:
            pipeline.tokenizer.model_max_length = longest
    return pipeline
