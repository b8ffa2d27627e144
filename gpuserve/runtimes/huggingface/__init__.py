"""Folders of Hugging Face as models: a task of transformers in each worker, tensors outside.

::

    model         from a folder to the class of its task, and what it declares
    folders       which task a folder is for, by its config.json: pure
    settings      the keyword arguments of a model
    libraries     transformers brought up for a device
    requests      rows of requests to values, and results back to their requests
    texts images speech   one class a task
    generation    prompts answered token by token; batches, sampling and decoding of it are in
    prompts batching sampling
    tokens        what an OpenAI client's prompt is to the model, once for all of its answers
"""

from gpuserve.runtimes.huggingface.model import HuggingFaceModel

__all__ = ["HuggingFaceModel"]
