"""Requests of OpenAI's clients as prompts, and pieces of text as tokens of answers. Imported only where a
model has ``openai: true``: it needs pydantic. What is not honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpuserve.core.errors import InvalidArgument
from gpuserve.openai import BadRequest, ChatRequest, CompletionRequest, Token, Usage
from gpuserve.runtimes.huggingface.prompts import Prompt, read_parameters

if TYPE_CHECKING:
    from gpuserve.runtimes.huggingface.generation import Writer

Asked = TypeVar("Asked", ChatRequest, CompletionRequest)
#: As OpenAI's own completions, where a client does not say.
_COMPLETION_TOKENS: Final = 16
_REFUSED: Final = ("frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "suffix")
_SAMPLING: Final = ("temperature", "top_p", "seed")
#: Not OpenAI's, but what clients of other servers send.
_MORE_SAMPLING: Final = ("top_k", "repetition_penalty")


async def chat_prompt(writer: Writer, request: ChatRequest) -> Prompt:
    """The conversation in the form of the model's template, with the turn of the assistant begun."""
    _refuse(request)
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise BadRequest("this model writes plain text", "response_format")
    n_characters = sum([len(one.text) for one in request.messages])

    def tokens() -> Any:
        messages = [{**one.model_dump(exclude_none=True), "content": one.text} for one in request.messages]
        try:
            text = writer.tokenizer.apply_chat_template(
                messages, tools=request.tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is the folder's own program, and may refuse what it likes
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadRequest(f"the model's template does not take them: {first}", "messages") from error
        return writer.tokenizer(text, add_special_tokens=False)["input_ids"]

    return _prompt(
        writer, await writer.tokens.of(request.messages, n_characters, tokens), request, "messages"
    )


async def completion_prompt(writer: Writer, request: CompletionRequest) -> Prompt:
    """The prompt of a completion, a text or the model's own tokens."""
    _refuse(request)
    tokens: Any = request.prompt
    if isinstance(tokens, str):
        text = tokens
        tokens = await writer.tokens.of(text, len(text), lambda: writer.tokenizer(text)["input_ids"])
    elif any(one >= writer.vocabulary for one in tokens):
        raise BadRequest(f"the model has tokens below {writer.vocabulary}, given {max(tokens)}", "prompt")
    return _prompt(writer, tokens, request, "prompt", {"max_new_tokens": _COMPLETION_TOKENS})


async def tokens_of(
    writer: Writer, request: Asked, prompt_of: Callable[[Writer, Asked], Awaitable[Prompt]]
) -> AsyncIterator[Any]:
    """What the model writes, as the tokens of an answer. No more is made when this is closed."""
    prompt = await prompt_of(writer, request)
    yield Usage(prompt_tokens=len(prompt.tokens))
    pieces = writer.write(prompt)
    try:
        async for text, count, finish_reason in pieces:
            yield Token(text, count, finish_reason)
    finally:
        await pieces.aclose()


def _refuse(request: Any) -> None:
    for name in _REFUSED:
        if getattr(request, name, None):
            raise BadRequest("this model does not honour it", name)


def _prompt(
    writer: Writer, tokens: Any, request: Any, member: str, said: dict[str, Any] | None = None
) -> Prompt:
    asked = {name: getattr(request, name) for name in _SAMPLING}
    asked |= {name: request.model_extra.get(name) for name in _MORE_SAMPLING}
    asked["max_new_tokens"] = request.token_limit
    known = {name: value for name, value in asked.items() if value is not None}
    try:
        return writer.prompt_of_tokens(tokens, {**(said or writer.unlimited), **read_parameters(known)})
    except InvalidArgument as error:
        raise BadRequest(str(error), member) from None
