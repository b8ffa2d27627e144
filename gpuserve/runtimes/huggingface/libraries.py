"""transformers, brought up for one model on one device. Only here is it imported; a folder is loaded without
any word to the network.
"""

from __future__ import annotations

import os
from typing import Any

from gpuserve.runtimes.huggingface.folders import is_hub_name, model_name, shown
from gpuserve.runtimes.huggingface.settings import Settings
from gpuserve.runtimes.missing import ModelFileError, library
from gpuserve.runtimes.served import threads_of

EXTRA = "huggingface"


def load_pipeline(settings: Settings, task: str, **components: Any) -> Any:
    """The pipeline of a task with its model on the device of the settings.

    Raises:
        ModelFileError: a library is missing, or the folder cannot be loaded.
    """
    _before_import(settings)
    torch = library("torch", EXTRA)
    transformers = library("transformers", EXTRA)
    _quiet(transformers)
    if settings.device == "cpu":
        torch.set_num_threads(threads_of(settings.instances))
    try:
        pipeline = transformers.pipeline(
            task,
            model=model_name(settings.file),
            device=settings.device,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code is True,  # None would ask at the terminal
            **components,
        )
    except Exception as error:  # a folder may lack anything, and bring code of its own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelFileError(
            f"{shown(settings.file)!r} cannot be loaded for {task}: {type(error).__name__}: {first}"
        ) from error
    pipeline.model.eval()
    if pipeline.tokenizer is not None:
        _limit_tokens(pipeline.tokenizer, pipeline.model.config)
    return pipeline


def _before_import(settings: Settings) -> None:
    """Both are read when the libraries are first imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not is_hub_name(settings.file):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _quiet(transformers: Any) -> None:
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def _limit_tokens(tokenizer: Any, config: Any) -> None:
    """Give a tokenizer that knows no longest text that of the model, which fails beyond it."""
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < tokenizer.model_max_length:
        tokenizer.model_max_length = longest
