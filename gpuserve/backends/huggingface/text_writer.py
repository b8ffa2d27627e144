"""``TextWriter``: the model of text generation with its tokenizer, for all requests of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeAlias

from gpuserve.backends.huggingface.model_folders import ModelSettings, load_pipeline
from gpuserve.backends.huggingface.prompt_batches import (
    MAX_NEW_TOKENS,
    OnPiece,
    Prompt,
    PromptBatches,
    PromptRow,
    Sampling,
    TextPiece,
    limited_prompt,
)
from gpuserve.backends.huggingface.structured_outputs import JsonGrammars

#: Tokenizing a shorter prompt takes a few milliseconds at most.
SHORT_CHARACTERS: Final = 16 << 10

TokenSequence: TypeAlias = Sequence[int]


class TextWriter:
    """A model that generates text, with its tokenizer."""

    def __init__(self, settings: ModelSettings) -> None:
        pipeline = load_pipeline(settings, "text-generation")
        self.tokenizer = pipeline.tokenizer
        self.shared_tokens = SharedTokens()
        self.model = pipeline.model
        self._config = pipeline.model.generation_config
        self._longest = getattr(pipeline.model.config, "max_position_embeddings", None)
        #: Every token is a number below this limit.
        self.vocabulary = int(pipeline.model.get_input_embeddings().num_embeddings)
        self._sampling = _folder_sampling(self._config)
        self._batches = PromptBatches(
            pipeline.model, self.tokenizer, rows=settings.prompts, batches=settings.batches
        )
        self.grammars = JsonGrammars(self.tokenizer, self.vocabulary, self._batches.end_tokens)

    def text_prompt(self, text: str, options: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a text, with the options of a request. Raise InvalidArgument."""
        return self.token_prompt(self.tokenizer(text)["input_ids"], options)

    def token_prompt(self, tokens: Sequence[int], options: Mapping[str, Any]) -> Prompt:
        limit = self._config.max_new_tokens or MAX_NEW_TOKENS
        return limited_prompt(tokens, options, self._sampling, limit, self._longest)

    @property
    def longest_options(self) -> dict[str, Any]:
        """The options of a prompt whose answer may be as long as the folder and the model allow."""
        limit = self._config.max_new_tokens or self._longest
        return {} if limit is None else {"max_new_tokens": limit}

    def submit_prompts(self, prompts: Sequence[tuple[Prompt, OnPiece]]) -> list[PromptRow]:
        return self._batches.submit_prompts(prompts)

    async def write(self, prompt: Prompt) -> AsyncGenerator[TextPiece]:
        """Yield the pieces of one answer. Closing the generator ends the generation."""
        pieces: asyncio.Queue[TextPiece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        (row,) = self.submit_prompts([(prompt, lambda piece: put_in_loop(loop, pieces, piece))])
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason:
                    return
        finally:
            row.cancel()


class SharedTokens:
    """The tokens of the prompts of requests. All answers of one request ask for the tokens in the same
    iteration of the event loop, and share them. Long prompts are tokenized in a thread.
    """

    def __init__(self) -> None:
        #: By the identity of a prompt: the prompt, so that the identity stays valid, and its tokens.
        self._shared: dict[int, tuple[object, asyncio.Future[TokenSequence]]] = {}
        #: A single thread, because a tokenizer does not support concurrent calls.
        self._executor = ThreadPoolExecutor(1, "tokens")

    async def of(self, prompt: Any, n_characters: int, make: Callable[[], TokenSequence]) -> TokenSequence:
        """Return what ``make`` returns for a prompt of ``n_characters``, or raise what ``make`` raises."""
        key = id(prompt)
        if key not in self._shared:
            loop = asyncio.get_running_loop()
            if n_characters > SHORT_CHARACTERS:
                future: asyncio.Future[TokenSequence] = loop.run_in_executor(self._executor, make)
            else:
                future = loop.create_future()
                try:
                    future.set_result(make())
                except Exception as error:  # a template is a program of its folder
                    future.set_exception(error)
            self._shared[key] = prompt, future
            future.add_done_callback(lambda done: self._forget(key, done))
        # Cancelling one answer must not cancel the others.
        return await asyncio.shield(self._shared[key][1])

    def _forget(self, key: int, done: asyncio.Future[TokenSequence]) -> None:
        del self._shared[key]
        done.exception()  # marks the error as retrieved; waiting tasks raise it


def put_in_loop(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], item: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(queue.put_nowait, item)


def _folder_sampling(config: Any) -> Sampling:
    """Return the folder's sampling, for requests that have no options."""
    penalty = config.repetition_penalty or 1.0
    if not config.do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=50 if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
        repetition_penalty=penalty,
    )
