"""Folders of Hugging Face run by vLLM, for OpenAI's clients (``runtime: vllm``).

Written to the documented interface of ``AsyncLLM`` (vLLM 0.11 and later). The tests run this file against a
stand-in for that interface; it has not run with vLLM itself.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from gpuserve.backends.model_files import ModelFileError, import_library

if TYPE_CHECKING:
    from gpuserve.openai import ChatRequest, CompletionRequest

_PACKAGE: Final = "vllm"
#: Requests in the engine at once; the engine queues those that it has no room for.
_CONCURRENCY: Final = 256
#: Default of OpenAI's own completions.
_COMPLETION_TOKENS: Final = 16
_SAMPLING: Final = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
#: Not in OpenAI's API, but clients of vLLM send these.
_MORE_SAMPLING: Final = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")
_REASONS: Final = frozenset({"stop", "length"})


class VllmModel:
    """An engine of vLLM behind OpenAI's endpoints.

    Args:
        file: Path of the folder, or name on the hub with its prefix hf:.
        device: Device of the instance. The engine uses the GPUs that its process sees.
        loras: Folders of LoRA adapters by the names under which clients ask for them.
        engine: Arguments of vLLM's ``AsyncEngineArgs``, such as max_model_len.

    Raises:
        ModelFileError: vLLM is not installed.
    """

    #: Members of a request that the engine honours.
    honours = ("frequency_penalty", "presence_penalty", "logit_bias", "tools", "response_format")

    def __init__(
        self, file: str, device: str = "cuda:0", loras: Mapping[str, str] | None = None, **engine: Any
    ) -> None:
        _require_vllm()
        args = import_library("vllm.engine.arg_utils", _PACKAGE).AsyncEngineArgs
        lora_request = import_library("vllm.lora.request", _PACKAGE).LoRARequest
        self._sampling = import_library("vllm.sampling_params", _PACKAGE)
        self._loras = {
            name: lora_request(name, number, path)
            for number, (name, path) in enumerate((loras or {}).items(), 1)
        }
        given = {"model": file.removeprefix("hf:"), "enable_lora": bool(loras), **engine}
        self._engine = import_library("vllm.v1.engine.async_llm", _PACKAGE).AsyncLLM.from_engine_args(
            args(**given)
        )

    @classmethod
    def declare(cls, file: str, loras: Mapping[str, str] | None = None, **_options: Any) -> dict[str, Any]:
        """Return the options of the model: the adapters are further names of the model."""
        _require_vllm()
        names = {"openai_names": list(loras)} if loras else {}
        return {"inputs": [], "outputs": [], "max_batch_size": 0, "concurrency": _CONCURRENCY, **names}

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Any]:
        from gpuserve.openai import BadRequest

        tokenizer = self._engine.get_tokenizer()
        if inspect.isawaitable(tokenizer):  # before vLLM 0.12
            tokenizer = await tokenizer
        tools = request.template_tools()
        try:
            text = tokenizer.apply_chat_template(
                request.conversation(), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is a program of the folder, and may refuse anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadRequest(f"the model's template rejects them: {reason}", "messages") from error
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._generate(request, {"prompt_token_ids": tokens}, request.token_limit)

    def complete(self, request: CompletionRequest) -> AsyncGenerator[Any]:
        is_text = isinstance(request.prompt, str)
        prompt = {"prompt" if is_text else "prompt_token_ids": request.prompt}
        return self._generate(request, prompt, request.token_limit or _COMPLETION_TOKENS)

    def close(self) -> None:
        self._engine.shutdown()

    async def _generate(
        self, request: Any, prompt: Mapping[str, Any], limit: int | None
    ) -> AsyncGenerator[Any]:
        """Yield the tokens of an answer. Closing the generator aborts the request in the engine."""
        from gpuserve.openai import BadRequest, Token, Usage

        given = {name: getattr(request, name) for name in _SAMPLING}
        given |= {name: (request.model_extra or {}).get(name) for name in _MORE_SAMPLING}
        given |= {"max_tokens": limit, "stop": list(request.stop) or None}
        if request.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        if (schema := request.answer_schema) is not None:
            given["structured_outputs"] = self._sampling.StructuredOutputsParams(json=schema)
        chosen = {name: value for name, value in given.items() if value is not None}
        try:
            params = self._sampling.SamplingParams(
                **{"max_tokens": None, **chosen}, output_kind=self._sampling.RequestOutputKind.DELTA
            )
            outputs = self._engine.generate(
                prompt, params, uuid4().hex, lora_request=self._loras.get(request.model)
            )
            is_first = True
            async with aclosing(outputs):
                async for output in outputs:
                    if is_first:
                        is_first = False
                        yield Usage(prompt_tokens=len(output.prompt_token_ids or ()))
                    for one in output.outputs:
                        reason = one.finish_reason if one.finish_reason in _REASONS else ""
                        yield Token(one.text, len(one.token_ids), reason)
        except ValueError as error:  # such as a prompt that is longer than the model's context
            raise BadRequest(str(error)) from error


def _require_vllm() -> None:
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ModelFileError("the Python package 'vllm' is not installed; pip install vllm installs it")
