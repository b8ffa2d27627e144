"""Triton's ``backend: "python"``: the module that a ``model.py`` imports, and the callable that runs it in a
worker.

::

    triton_model          the callable: imports model.py, initializes the model
    execution             calls execute, one class for each kind of model
    inference_requests    requests that execute receives, and requests to other models
    responses             responses, their sender, their queue
    tensors               tensors, datatypes, DLPack
    model_config          the configuration that auto_complete_config completes
    model_server          log, metrics, other models of the server
    importable/           triton_python_backend_utils

config.pbtxt and model repositories are read elsewhere.
"""
