"""What a model configuration in Triton's JSON says, as a config file's entry would say it, and what
``auto_complete_config`` adds to it. Only what that can set is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.python_backend.config_lookup import using_decoupled_model_transaction_policy
from gpuserve.python_backend.model_config import ModelConfig
from gpuserve_worker.calling.callable import LoadError
from gpuserve_worker.calling.failure import log_text, log_traceback

_COMPLETE: Final = "auto_complete_config"
#: Without one of them a request is a batch of its own.
_SCHEDULERS: Final = frozenset({"dynamic_batching", "sequence_batching"})


def completed_config(model_class: Any, config: str) -> str:
    """The model configuration, completed by the class where it does that; ``LoadError``: it could not."""
    complete = getattr(model_class, _COMPLETE, None)
    if complete is None:
        return config
    try:
        completed = complete(ModelConfig(config))
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise LoadError(f"{_COMPLETE} raised {log_text(error)}", log_traceback(error)) from None
    if not isinstance(completed, ModelConfig):
        raise LoadError(
            f"{_COMPLETE} must return the pb_utils.ModelConfig that it was given, but returned "
            f"{type(completed).__name__}"
        )
    return json.dumps(completed.as_dict())


def declared_keys(config: str) -> dict[str, Any]:
    """The keys of a config file's entry that say the same."""
    said = json.loads(config)
    return {
        "inputs": [_tensor(one) for one in said.get("input", ())],
        "outputs": [_tensor(one) for one in said.get("output", ())],
        "max_batch_size": int(said.get("max_batch_size", 0)),
        "decoupled": using_decoupled_model_transaction_policy(said),
        "batching": {"merge": not _SCHEDULERS.isdisjoint(said)},
        "request_details": True,
        "strict": False,  # as Triton, which lets outputs be left out
    }


def _tensor(said: Mapping[str, Any]) -> dict[str, Any]:
    dims = said.get("reshape", {}).get("shape") or said.get("dims", ())
    datatype = str(said.get("data_type", "")).removeprefix("TYPE_")
    entry = {
        "name": said.get("name", ""),
        "dtype": "BYTES" if datatype == "STRING" else datatype,
        "shape": [int(one) for one in dims],
    }
    return entry | ({"optional": True} if said.get("optional") else {})
