"""OpenAI's requests as prompts, and generated text as tokens of answers. Needs pydantic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from gpuserve.backends.huggingface.prompt_batches import Prompt, read_parameters
from gpuserve.backends.huggingface.text_writer import TextWriter
from gpuserve.backends.huggingface.tool_calls import ToolCallReader, response_template_of
from gpuserve.core.errors import InvalidArgument
from gpuserve.openai import BadRequest, ChatRequest, CompletionRequest, Token, Usage

#: Default of OpenAI's own completions.
_COMPLETION_TOKENS: Final = 16
_SAMPLING: Final = ("temperature", "top_p", "seed")
#: Not in OpenAI's API, but clients of other servers send these.
_MORE_SAMPLING: Final = ("top_k", "repetition_penalty")


async def chat_prompt(writer: TextWriter, request: ChatRequest) -> Prompt:
    """Return the conversation in the template's form, up to the assistant's turn."""
    n_characters = sum([len(one.text) for one in request.messages])

    def tokens() -> Any:
        messages = [{**one.model_dump(exclude_none=True), "content": one.text} for one in request.messages]
        try:
            text = writer.tokenizer.apply_chat_template(
                messages, tools=request.template_tools(), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is a program of the folder, and may refuse anything
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadRequest(f"the model's template rejects them: {first}", "messages") from error
        return writer.tokenizer(text, add_special_tokens=False)["input_ids"]

    return _sampled_prompt(
        writer, await writer.shared_tokens.of(request.messages, n_characters, tokens), request, "messages"
    )


async def completion_prompt(writer: TextWriter, request: CompletionRequest) -> Prompt:
    """Return the prompt of a completion, a text or the model's own tokens."""
    tokens: Any = request.prompt
    if isinstance(tokens, str):
        text = tokens
        tokens = await writer.shared_tokens.of(text, len(text), lambda: writer.tokenizer(text)["input_ids"])
    elif any(one >= writer.vocabulary for one in tokens):
        raise BadRequest(f"the model has tokens below {writer.vocabulary}, given {max(tokens)}", "prompt")
    return _sampled_prompt(writer, tokens, request, "prompt", {"max_new_tokens": _COMPLETION_TOKENS})


async def generate_tokens(writer: TextWriter, request: ChatRequest | CompletionRequest) -> AsyncIterator[Any]:
    """Yield the generated text as tokens of an answer. Closing the generator ends the generation."""
    try:
        matcher = await writer.grammars.matcher_of(request.answer_schema)
    except InvalidArgument as error:
        raise BadRequest(str(error), "response_format") from None
    tools = request.template_tools() if isinstance(request, ChatRequest) else None
    if matcher is not None and tools:
        raise BadRequest("expected none beside tools", "response_format")
    if isinstance(request, ChatRequest):
        prompt = await chat_prompt(writer, request)
    else:
        prompt = await completion_prompt(writer, request)
    prompt = replace(prompt, matcher=matcher)
    template, reader = response_template_of(writer.tokenizer, writer.model) if tools else None, None
    if isinstance(request, ChatRequest) and template is not None:
        if request.logprobs:
            raise BadRequest("expected none beside tools", "logprobs")
        prompt = replace(prompt, with_special=True)
        parser = writer.tokenizer.get_response_parser(template, prefix=list(prompt.tokens), tools=tools)
        reader = ToolCallReader(parser, is_parallel=request.parallel_tool_calls is not False)
    yield Usage(prompt_tokens=len(prompt.tokens))
    async with aclosing(writer.write(prompt)) as pieces:
        async for piece in pieces:
            for value in reader.read(piece) if reader is not None else [Token(*piece)]:
                yield value


def _sampled_prompt(
    writer: TextWriter, tokens: Any, request: Any, member: str, defaults: dict[str, Any] | None = None
) -> Prompt:
    requested = {name: getattr(request, name) for name in _SAMPLING}
    requested |= {name: request.model_extra.get(name) for name in _MORE_SAMPLING}
    requested["max_new_tokens"] = request.token_limit
    known = {name: value for name, value in requested.items() if value is not None}
    likeliest = request.logprobs
    if isinstance(request, ChatRequest):
        likeliest = request.top_logprobs or 0 if request.logprobs else None
    try:
        options = {**(defaults or writer.longest_options), **read_parameters(known)}
        return replace(writer.token_prompt(tokens, options), n_likeliest=likeliest)
    except InvalidArgument as error:
        raise BadRequest(str(error), member) from None
