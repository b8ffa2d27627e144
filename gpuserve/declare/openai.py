"""What ``openai: true`` says of a model besides itself: its tensors, its stream, and what its callable is
wrapped in. Bodies of HTTP go to the worker as they are; ``gpuserve/openai`` reads them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuserve.declare.model import Tensor

OPENAI: Final = "openai"
#: The body of a request, and the JSON of a response or of a chunk.
REQUEST: Final = "request"
RESPONSE: Final = "response"
#: The parameter of a request that says which endpoint it came to: chat, completions or embeddings.
ENDPOINT: Final = "endpoint"
#: Makes an inference callable of what a user wrote.
ADAPTER: Final = "gpuserve.openai.model:adapted"
INPUTS: Final = (Tensor(name=REQUEST, dtype="bytes", shape=(1,)),)
OUTPUTS: Final = (Tensor(name=RESPONSE, dtype="bytes", shape=(1,)),)

_INPUT: Final = {"name": REQUEST, "dtype": "bytes", "shape": [1]}
_OUTPUT: Final = {"name": RESPONSE, "dtype": "bytes", "shape": [1]}
#: A stream has any number of responses.
NOT_DECOUPLED: Final = "decoupled: false does not go with openai: the chunks of a stream are responses"


def completed(data: Any) -> Any:
    """Plain data of a whole configuration, where each model with ``openai: true`` has its tensors."""
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, list) or not any(map(is_openai, models)):
        return data
    return {**data, "models": [_completed(one) if is_openai(one) else one for one in models]}


def is_openai(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get(OPENAI) is True


def _completed(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"inputs": [_INPUT], "outputs": [_OUTPUT], "decoupled": True, **entry}


def tensors_problem(key: str, given: Any) -> str | None:
    """What is wrong with the tensors under a key of a model with ``openai: true``; None where nothing is."""
    if given in ([_INPUT], [_OUTPUT], INPUTS, OUTPUTS):
        return None
    return f"{key} do not go with openai: the server knows the tensors of its requests"
