"""What a model with ``openai: true`` is written with: the requests of OpenAI's clients as typed objects, and
what a callable may answer them with. The contract is in docs/reference.md. Needs the extra ``openai``.

Only workers import this package, and the programs of users. How an endpoint is reached over HTTP is not here
(``gpuserve/front/doors/openai``), nor is any engine: a callable makes the tokens.
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
from gpuserve.openai.requests import ChatMessage, ChatRequest, CompletionRequest, EmbeddingRequest

__all__ = [
    "BadRequest",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "Embeddings",
    "Token",
    "ToolCall",
    "Usage",
]
