"""The bodies of OpenAI's requests as typed objects, checked. Members that are not known here are kept, in
``model_extra``, and are the callable's to read. What is wrong is told as ``BadRequest``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

from gpuserve.openai.answers import BadRequest

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_CHOICES: Final = 256
#: Of all prompts in all answers together.
MAX_ECHOED_CHARACTERS: Final = 4 << 20
#: Each answer has a copy of the table of them.
MAX_MORE_MEMBERS: Final = 256
MAX_INPUTS: Final = 2048
#: Of a value that is wrong, so much is told.
_SHOWN: Final = 64

Prompt: TypeAlias = "str | list[int]"


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _inputs(value: Any) -> list[Prompt]:
    """Texts or lists of tokens, of which one may stand alone."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not (all(isinstance(one, str) for one in value) or all(map(_is_tokens, value))):
        raise ValueError("expected a string, a list of strings, a list of tokens, or a list of those")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"expected at most {MAX_INPUTS} of them, given {len(value)}")
    return list(value)


def _stops(value: Any) -> tuple[str, ...]:
    found = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise ValueError("expected a string or a list of strings")
    if len(found) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} strings, given {len(found)}")
    if (longest := max(map(len, found), default=0)) > MAX_STOP_CHARACTERS:
        raise ValueError(f"expected at most {MAX_STOP_CHARACTERS} characters in a string, given {longest}")
    return tuple([one for one in found if one])


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(one, dict) and "type" in one for one in value):
        raise ValueError("expected a string, or a list of parts that have a type")
    return value


def _whole(value: Any, default: Any) -> Any:
    return default if value is None else value


Inputs = Annotated[Any, BeforeValidator(_inputs)]
Stops = Annotated[Any, BeforeValidator(_stops)]
Flag = Annotated[bool, BeforeValidator(lambda value: _whole(value, False))]
Count = Annotated[int, Field(ge=1, le=128), BeforeValidator(lambda value: _whole(value, 1))]
Limit = Annotated[int | None, Field(ge=1)]
Temperature = Annotated[float | None, Field(ge=0, le=2)]
Share = Annotated[float | None, Field(ge=0, le=1)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Likeliest = Annotated[int | None, Field(ge=0, le=20)]
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class StreamOptions(_Part):
    """What a stream tells beside its text."""

    include_usage: Flag = False


class ChatMessage(_Part):
    """One message of a conversation. ``content`` is a text, or a list of parts as mappings."""

    role: Role
    content: Annotated[Any, AfterValidator(_content)] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text of the message; ``BadRequest``: parts of it are no text."""
        if isinstance(self.content, list):
            if kinds := {one["type"] for one in self.content} - {"text"}:
                raise BadRequest(f"this model reads text, not {sorted(map(str, kinds))[0]}", "messages")
            return "".join(str(one.get("text", "")) for one in self.content)
        return self.content or ""


class OpenAIRequest(_Part):
    """What all requests have. ``parameters`` are what the server forwards of the request's headers."""

    model: Annotated[str, Field(max_length=128)]
    user: str | None = None
    _parameters: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._parameters


class _TextRequest(OpenAIRequest):
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    stop: Stops = ()
    max_tokens: Limit = None
    temperature: Temperature = None
    top_p: Share = None
    seed: int | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: dict[str, float] | None = None

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have; None: the client does not say."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_TextRequest):
    """A body of ``/v1/chat/completions``. A callable is given one for each answer: ``n`` is 1."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: Flag = False
    top_logprobs: Likeliest = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as plain mappings, as chat templates take them."""
        return [one.model_dump(exclude_none=True) for one in self.messages]


class CompletionRequest(_TextRequest):
    """A body of ``/v1/completions``. A callable is given one for each answer, whose ``prompt`` is one text,
    or one list of tokens; ``prompts`` are all of the client's.
    """

    prompts: Inputs = Field(validation_alias="prompt")
    suffix: str | None = None
    echo: Flag = False
    logprobs: Likeliest = None
    best_of: Annotated[int | None, Field(ge=1)] = None

    @property
    def prompt(self) -> Prompt:
        first: Prompt = self.prompts[0]
        return first

    @property
    def text(self) -> str:
        """The prompt; ``BadRequest``: it is tokens."""
        return _text(self.prompt, "prompt")


class EmbeddingRequest(OpenAIRequest):
    """A body of ``/v1/embeddings``. ``inputs`` are the client's texts, or lists of tokens."""

    inputs: Inputs = Field(validation_alias="input")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None

    @property
    def texts(self) -> list[str]:
        """The inputs; ``BadRequest``: they are tokens."""
        self.only_texts()
        return list(self.inputs)

    def only_texts(self) -> None:
        """Raise ``BadRequest`` where the inputs are tokens."""
        _text(self.inputs[0], "input")


Asked = TypeVar("Asked", bound=OpenAIRequest)


def parse(kind: type[Asked], body: bytes, parameters: Mapping[str, Any]) -> Asked:
    """The request in a body; raises ``BadRequest``."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise _told(error) from None
    asked._parameters = parameters
    if (n := len(asked.model_extra or ())) > MAX_MORE_MEMBERS:
        raise BadRequest(f"expected at most {MAX_MORE_MEMBERS} members that OpenAI's API has not, given {n}")
    if isinstance(asked, _TextRequest):
        _check_together(asked)
    return asked


def each_answer(asked: _TextRequest) -> list[Any]:
    """The request for each answer that is wanted, all of the first prompt first."""
    made: list[Any] = []
    prompts: list[dict[str, Any]] = [{}]
    if isinstance(asked, CompletionRequest):
        prompts = [{"prompts": [one]} for one in asked.prompts]
    for prompt in prompts:
        for number in range(asked.n):
            seed = asked.seed + number if asked.seed is not None else None
            made.append(asked.model_copy(update={**prompt, "n": 1, "seed": seed}))
    return made


def _check_together(asked: _TextRequest) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("expected only where stream is true", "stream_options")
    if isinstance(asked, ChatRequest):
        if asked.top_logprobs and not asked.logprobs:
            raise BadRequest("expected only where logprobs is true", "top_logprobs")
        return
    assert isinstance(asked, CompletionRequest)
    if asked.best_of is not None and asked.best_of > asked.n:
        raise BadRequest("every answer that is made is given: expected at most n", "best_of")
    if len(asked.prompts) * asked.n > MAX_CHOICES:
        raise BadRequest(
            f"expected at most {MAX_CHOICES} answers, prompts times n, given {len(asked.prompts) * asked.n}",
            "prompt",
        )
    if asked.echo and not all(isinstance(one, str) for one in asked.prompts):
        raise BadRequest("only a prompt of text can be echoed", "echo")
    if asked.echo and (n := sum(map(len, asked.prompts)) * asked.n) > MAX_ECHOED_CHARACTERS:
        raise BadRequest(
            f"expected at most {MAX_ECHOED_CHARACTERS} characters of prompts times n, given {n}", "echo"
        )


def _told(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    text = first["msg"].removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    if first["type"] not in {"missing", "value_error"}:
        text += f", given {_shown(first['input'])}"
    return BadRequest(text, ".".join([str(one)[:_SHOWN] for one in first["loc"]]))


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[: _SHOWN + 1] if isinstance(value, str) else value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _text(given: Prompt, member: str) -> str:
    if not isinstance(given, str):
        raise BadRequest("this model takes text, not tokens", member)
    return given
