"""A GGUF file for OpenAI's clients: llama.cpp computes the steps, which requests join and leave."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from gpuserve import Last, Later
from gpuserve.openai import BadRequest, ChatRequest, CompletionRequest, Token, Usage

TEMPLATE = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant: "
COMPLETION_TEMPERATURE = 1.0


class Answer:
    """An answer in one sequence of the KV cache. ``done`` of its ``tokens`` are in the cache."""

    def __init__(self, sequence: int, tokens: list[int], sampler: Any) -> None:
        self.sequence, self.tokens, self.sampler = sequence, tokens, sampler
        self.done, self.n_prompt = 0, len(tokens)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


class Engine:
    """The model and its KV cache, with a sequence of ``length`` tokens for each active answer.

    Args:
        file: Path of the GGUF file.
        max_active: Answers that are computed together.
        length: Tokens of a prompt and its answer.
        batch: Tokens of a step. A long prompt is read in several steps, beside the answers of others.
        threads: Threads of a step.
    """

    def __init__(
        self, file: str, max_active: int = 8, length: int = 1024, batch: int = 256, threads: int = 2
    ) -> None:
        self.max_active, self._length, self._room = max_active, length, batch
        self._words = llama.Llama(file, vocab_only=True, verbose=False)  # first, because it turns off the log
        self._model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {file}")
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch = max_active * length, max_active, batch
        options.n_threads = options.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, options)
        self._vocabulary = llama.llama_model_get_vocab(self._model)
        self._batch = llama.llama_batch_init(batch, 0, 1)
        template = self._words.metadata.get("tokenizer.chat_template", TEMPLATE)
        self._chat = Jinja2ChatFormatter(template, eos_token="", bos_token="")
        self._free = list(range(max_active))

    def admit(self, request: ChatRequest | CompletionRequest) -> Answer:
        if not self._free:
            raise Later
        tokens = self._prompt(request)
        if not 0 < len(tokens) < self._length:
            raise BadRequest(f"expected a prompt of 1 to {self._length - 1} tokens, given {len(tokens)}")
        return Answer(self._free.pop(), tokens, self._sampler(request))

    def step(self, active: Sequence[Answer]) -> list[Any]:
        """Compute the next token of each answer, and as much of the prompts as fits into the batch."""
        self._batch.n_tokens = 0
        outputs = {}
        for one in sorted(active, key=lambda one: len(one.tokens) - one.done):  # answers before prompts
            if (output := self._add(one)) is not None:
                outputs[one] = output
        if llama.llama_decode(self._context, self._batch):
            raise RuntimeError("llama.cpp could not compute a step")
        return [self._next(one, outputs[one]) if one in outputs else None for one in active]

    def release(self, answer: Answer) -> None:
        llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), answer.sequence, -1, -1)
        llama.llama_sampler_free(answer.sampler)
        self._free.append(answer.sequence)

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def _prompt(self, request: ChatRequest | CompletionRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            messages = [{"role": one.role, "content": one.text} for one in request.messages]
            return self._words.tokenize(self._chat(messages=messages).prompt.encode(), special=True)
        return self._words.tokenize(request.text.encode())

    def _sampler(self, request: ChatRequest | CompletionRequest) -> Any:
        made = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        temperature = COMPLETION_TEMPERATURE if request.temperature is None else request.temperature
        if temperature == 0:
            llama.llama_sampler_chain_add(made, llama.llama_sampler_init_greedy())
            return made
        seed = random.getrandbits(32) if request.seed is None else request.seed & 0xFFFF_FFFF
        llama.llama_sampler_chain_add(made, llama.llama_sampler_init_top_p(request.top_p or 1.0, 1))
        llama.llama_sampler_chain_add(made, llama.llama_sampler_init_temp(temperature))
        llama.llama_sampler_chain_add(made, llama.llama_sampler_init_dist(seed))
        return made

    def _add(self, answer: Answer) -> int | None:
        """Add tokens of an answer to the batch. Return the place of its last token, if that is added."""
        place = None
        while answer.done < len(answer.tokens) and self._batch.n_tokens < self._room:
            place = self._batch.n_tokens
            self._batch.token[place] = answer.tokens[answer.done]
            self._batch.pos[place] = answer.done
            self._batch.n_seq_id[place], self._batch.seq_id[place][0] = 1, answer.sequence
            answer.done += 1
            self._batch.logits[place] = answer.done == len(answer.tokens)
            self._batch.n_tokens += 1
        return place if answer.done == len(answer.tokens) else None

    def _next(self, answer: Answer, output: int) -> Any:
        token = llama.llama_sampler_sample(answer.sampler, self._context, output)
        is_first = len(answer.tokens) == answer.n_prompt
        answer.tokens.append(token)
        values: list[Any] = [Usage(prompt_tokens=answer.n_prompt)] if is_first else []
        if llama.llama_vocab_is_eog(self._vocabulary, token):
            return Last([*values, Token(answer.decoder.decode(b"", True), 0, "stop")])
        text = answer.decoder.decode(self._words.detokenize([token], special=False))
        if len(answer.tokens) > self._length:
            return Last([*values, Token(text, 1, "length")])
        return [*values, Token(text)]
