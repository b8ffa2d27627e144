"""The engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams


class Tokenizer:
    """A token is a character."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return " ".join(one["content"] for one in conversation)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(one) for one in text]}


class AsyncLLM:
    def __init__(self, args: AsyncEngineArgs) -> None:
        self._args = args
        record(f"model {Path(args.model).name} lora {args.enable_lora} length {args.max_model_len}")

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        return cls(engine_args)

    async def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    async def generate(
        self,
        prompt: Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Any]:
        assert sampling_params.output_kind is RequestOutputKind.DELTA
        tokens = prompt.get("prompt_token_ids") or [ord(one) for one in prompt["prompt"]]
        if self._args.max_model_len and len(tokens) > self._args.max_model_len:
            raise ValueError(f"The prompt has {len(tokens)} tokens, the model {self._args.max_model_len}.")
        words = "".join(map(chr, tokens)).split()
        if sampling_params.structured_outputs is not None:
            words = [json.dumps(sampling_params.structured_outputs.json)]
        if lora_request is not None:
            words = [f"{lora_request.lora_name}:{word}" for word in words]
        limit = len(words) if sampling_params.max_tokens is None else sampling_params.max_tokens
        try:
            for at, word in enumerate(words[:limit]):
                await asyncio.sleep(60 if word == "endless" else 0)
                last = at + 1 == min(limit, len(words))
                reason = ("length" if limit < len(words) else "stop") if last else None
                one = SimpleNamespace(
                    text=word if at == 0 else f" {word}", token_ids=[at], finish_reason=reason
                )
                yield SimpleNamespace(prompt_token_ids=tokens, outputs=[one], finished=last)
        except (asyncio.CancelledError, GeneratorExit):
            record(f"abort {request_id}")
            raise

    def shutdown(self) -> None:
        record("shutdown")


def record(line: str) -> None:
    with open(os.environ["VLLM_RECORD"], "a") as file:
        file.write(f"{line}\n")
