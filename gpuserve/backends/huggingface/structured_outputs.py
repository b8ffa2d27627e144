"""The ``response_format`` of OpenAI's requests: JSON by a schema, as masks of the next token of a row.

llguidance (the extra ``structured-outputs``) compiles a schema to a grammar and computes the masks.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from gpuserve.backends.model_files import ModelFileError, import_library
from gpuserve.core.errors import InvalidArgument

_EXTRA: Final = "structured-outputs"
#: Without a limit a model may write white space until the end of its tokens.
_WHITE_SPACE: Final = r"[ \n\r\t]{0,32}"
_CACHED_GRAMMARS: Final = 64
_MAX_ERROR_CHARACTERS: Final = 200


class JsonGrammars:
    """The grammars of the schemas of requests, for a fast tokenizer of transformers. ``vocabulary`` is the
    number of scores of a token, and ``end_tokens`` may follow the whole JSON.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._compiled = functools.lru_cache(_CACHED_GRAMMARS)(self._compile)
        #: A single thread, so that the answers of one request share what the first of them compiles.
        self._executor = ThreadPoolExecutor(1, "grammars")

    async def matcher_of(self, schema: Mapping[str, Any] | None) -> Any:
        """Return a new answer's state in the grammar of a schema; None for text. Raise InvalidArgument."""
        if schema is None:
            return None
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._executor, self._compiled, json.dumps(schema))
        return matcher.deep_copy()

    def _compile(self, schema: str) -> Any:
        try:
            matchers = import_library("llguidance", _EXTRA).LLMatcher
        except ModelFileError as error:
            raise InvalidArgument(str(error)) from None
        grammar = matchers.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE})
        matcher = matchers(self._guided_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:_MAX_ERROR_CHARACTERS]
            raise InvalidArgument(f"the schema cannot be followed: {reason}")
        return matcher

    @functools.cached_property
    def _guided_tokenizer(self) -> Any:
        if not self._end_tokens:
            raise InvalidArgument("the model has no end token, so it cannot end JSON")
        try:
            made = import_library("llguidance.hf", _EXTRA).from_tokenizer
            return made(self._tokenizer, self._vocabulary, self._end_tokens)
        except ValueError as error:
            raise InvalidArgument(f"the model's tokenizer does not support it: {error}") from None


class JsonMask:
    """A logits processor of transformers for one row, which excludes tokens that the grammar does not allow.
    ``matcher`` is the state of the row's answer. ``fail`` ends the row with an error.
    """

    def __init__(self, matcher: Any, fail: Callable[[Exception], None]) -> None:
        self._matcher = matcher
        self._fail = fail
        self._n_consumed: int | None = None

    def __call__(self, tokens: Any, scores: Any) -> Any:
        """Return the scores [1, vocabulary] of the next token after ``tokens`` [1, length]."""
        import torch

        if self._n_consumed is not None:  # the first call has the prompt alone
            self._matcher.consume_tokens(tokens[0, self._n_consumed :].tolist())
        self._n_consumed = tokens.shape[1]
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():  # such as a state that is too complex
            reason = " ".join(self._matcher.get_error().split())[:_MAX_ERROR_CHARACTERS]
            self._fail(RuntimeError(f"the answer cannot follow the schema: {reason}"))
        return scores.masked_fill(allowed.to(scores.device) == 0, -torch.inf)
