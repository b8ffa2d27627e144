"""Typed requests of OpenAI's clients for models with ``openai: true``, and the answers of their callables.

The contract is in docs/reference.md. The package needs the extra ``openai``. Only workers and user programs
import the package. ``gpuserve/front/protocols/openai_api.py`` handles HTTP. There is no engine here: a
callable generates the tokens.

::

    request_types    bodies of requests, parsed and checked
    answers          values that callables return, stop sequences, token limits
    documents        the JSON of answers
    adapter          a user's callable as an inference callable
"""

from __future__ import annotations

try:
    import pydantic as _pydantic
except ImportError as error:
    raise ImportError(
        "a model with openai: true needs pydantic of version 2: pip install 'gpuserve[openai]'"
    ) from error
if _pydantic.VERSION.startswith("1."):
    raise ImportError(
        f"a model with openai: true needs pydantic of version 2, {_pydantic.VERSION} is installed: "
        "pip install 'gpuserve[openai]'"
    )

from gpuserve.openai.answers import BadRequest, Embeddings, Token, ToolCall, Usage
from gpuserve.openai.request_types import ChatMessage, ChatRequest, CompletionRequest, EmbeddingRequest

__all__ = [
    "BadRequest", "ChatMessage", "ChatRequest", "CompletionRequest", "EmbeddingRequest", "Embeddings",
    "Token", "ToolCall", "Usage",
]  # fmt: skip
