"""Bodies of OpenAI's requests as typed, checked objects.

Unknown members are kept in ``model_extra`` for the callable. Every violation is a ``BadRequest``.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from gpuserve.openai.answers import BadRequest

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_CHOICES: Final = 256
#: Limit of the prompts in all answers together.
MAX_ECHOED_CHARACTERS: Final = 4 << 20
#: Limit of unknown members, because each answer has a copy of their dict.
MAX_MORE_MEMBERS: Final = 256
MAX_INPUTS: Final = 2048
#: Number of characters of an invalid value in its error text.
_SHOWN_CHARACTERS: Final = 64

Prompt: TypeAlias = "str | list[int]"


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _input_list(value: Any) -> list[Prompt]:
    """Return texts or lists of tokens as a list. A single one may stand alone."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not (all(isinstance(one, str) for one in value) or all(map(_is_tokens, value))):
        raise ValueError("expected a string, a list of strings, a list of tokens, or a list of those")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"expected at most {MAX_INPUTS} of them, given {len(value)}")
    return list(value)


def _texts_to_embed(value: Any) -> list[Prompt]:
    found = _input_list(value)
    if "" in found:
        raise ValueError("expected texts that are not empty, given an empty one")
    return found


def _stop_sequences(value: Any) -> tuple[str, ...]:
    found = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise ValueError("expected a string or a list of strings")
    if len(found) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} strings, given {len(found)}")
    if (longest := max(map(len, found), default=0)) > MAX_STOP_CHARACTERS:
        raise ValueError(f"expected at most {MAX_STOP_CHARACTERS} characters in a string, given {longest}")
    return tuple([one for one in found if one])


def _message_content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(one, dict) and "type" in one for one in value):
        raise ValueError("expected a string, or a list of parts that have a type")
    if any(one["type"] == "text" and not isinstance(one.get("text"), str) for one in value):
        raise ValueError('expected each part of the type "text" to have a text')
    return value


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    """Return a tool, a choice of one, or a call of one: an object of its type's name, which has a name."""
    kind = value.get("type")
    if kind not in ("function", "custom"):
        raise ValueError(f'expected the type "function" or "custom", given {_shown(kind)}')
    inner = value.get(kind)
    if not isinstance(inner, dict) or not (isinstance(inner.get("name"), str) and inner["name"]):
        raise ValueError(f'expected "{kind}" to be an object with a name')
    if not isinstance(inner.get("parameters"), dict | None):
        raise ValueError('expected "parameters" to be an object')
    return value


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict):
        return value if value.get("type") == "allowed_tools" else _tool(value)
    if value not in (None, "none", "auto", "required"):
        raise ValueError(f'expected "none", "auto", "required" or an object, given {_shown(value)}')
    return value


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    kind, inner = value.get("type"), value.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f'expected the type "text", "json_object" or "json_schema", given {_shown(kind)}')
    if kind == "json_schema" and not (isinstance(inner, dict) and isinstance(inner.get("schema"), dict)):
        raise ValueError('expected "json_schema" to be an object with a schema')
    return value


def _logit_bias(value: dict[str, float]) -> dict[str, float]:
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and abs(bias) <= 100):
            pair = f"{_shown(token)}: {_shown(bias)}"
            raise ValueError(f"expected numbers of tokens with a bias from -100 to 100, given {pair}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else "a list" if value else "an empty list"
    cut = value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str) else value
    given = json.dumps(cut, default=str)
    return given if len(given) <= _SHOWN_CHARACTERS else f"{given[:_SHOWN_CHARACTERS]}…"


Tool = Annotated[dict[str, Any], AfterValidator(_tool)]
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
Limit = Annotated[int | None, Field(ge=1)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class _StrictModel(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True, frozen=True)


class StreamOptions(_StrictModel):
    """The options of a stream."""

    include_usage: Flag = False


class ChatMessage(_StrictModel):
    """A message of a conversation. ``content`` is a text, or a list of parts as mappings."""

    role: Role
    content: Annotated[Any, AfterValidator(_message_content)] = None
    name: str | None = None
    tool_calls: list[Tool] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text of the message. Raise ``BadRequest`` if a part is no text."""
        if isinstance(self.content, list):
            if kinds := {one["type"] for one in self.content} - {"text"}:
                raise BadRequest(f"this model reads text, not {sorted(map(str, kinds))[0]}", "messages")
            return "".join(str(one.get("text", "")) for one in self.content)
        return self.content or ""


class TypedRequest(_StrictModel):
    """The members of all requests. ``parameters`` are forwarded values of headers."""

    model: Annotated[str, Field(max_length=128)]
    user: str | None = None
    _parameters: Mapping[str, Any] = pydantic.PrivateAttr(default_factory=dict)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._parameters


class _GenerationRequest(TypedRequest):
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128), BeforeValidator(lambda value: 1 if value is None else value)] = 1
    stop: Annotated[Any, BeforeValidator(_stop_sequences)] = ()
    max_tokens: Limit = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: int | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: Annotated[dict[str, float], AfterValidator(_logit_bias)] | None = None
    response_format: Annotated[dict[str, Any], AfterValidator(_response_format)] | None = None

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens of the answer, or None for no limit."""
        return self.max_tokens

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the answer by ``response_format``, or None for text."""
        given = self.response_format or {"type": "text"}
        if given["type"] == "json_object":
            return {"type": "object"}
        return None if given["type"] == "text" else dict(given["json_schema"]["schema"])

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_GenerationRequest):
    """A body of ``/v1/chat/completions``. A callable receives one for each answer, with ``n`` of 1."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: Flag = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the functions for a chat template. Raise ``BadRequest`` if the client wants a call in any
        case, or offers another kind of tools.
        """
        if self.tool_choice not in (None, "auto", "none"):
            raise BadRequest('a call cannot be promised: expected "auto" or "none"', "tool_choice")
        if any(one["type"] != "function" for one in self.tools or ()):
            raise BadRequest("this model calls functions alone", "tools")
        return None if self.tool_choice == "none" else self.tools or None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as plain mappings, the form that chat templates take."""
        return [one.model_dump(exclude_none=True) for one in self.messages]


class CompletionRequest(_GenerationRequest):
    """A body of ``/v1/completions``. A callable receives one for each answer, whose ``prompt`` is one text or
    one list of tokens. ``prompts`` are all of the client's prompts.
    """

    prompts: Annotated[Any, BeforeValidator(_input_list)] = Field(validation_alias="prompt")
    suffix: str | None = None
    echo: Flag = False
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: Limit = None

    @property
    def prompt(self) -> Prompt:
        first: Prompt = self.prompts[0]
        return first

    @property
    def text(self) -> str:
        """The prompt as a text. Raise ``BadRequest`` if the prompt is tokens."""
        return _as_text(self.prompt, "prompt")


class EmbeddingRequest(TypedRequest):
    """A body of ``/v1/embeddings``. ``inputs`` are the client's texts, or lists of tokens."""

    inputs: Annotated[Any, BeforeValidator(_texts_to_embed)] = Field(validation_alias="input")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Limit = None

    @property
    def texts(self) -> list[str]:
        """The inputs as texts. Raise ``BadRequest`` if the inputs are tokens."""
        self.require_texts()
        return list(self.inputs)

    def require_texts(self) -> None:
        """Raise ``BadRequest`` if the inputs are tokens."""
        _as_text(self.inputs[0], "input")


Parsed = TypeVar("Parsed", bound=TypedRequest)


def parse_request(kind: type[Parsed], body: bytes, parameters: Mapping[str, Any]) -> Parsed:
    """Parse and check the body of a request. Raise ``BadRequest``."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request_of(error) from None
    request._parameters = parameters
    if (n := len(request.model_extra or ())) > MAX_MORE_MEMBERS:
        raise BadRequest(f"expected at most {MAX_MORE_MEMBERS} members that OpenAI's API has not, given {n}")
    if isinstance(request, _GenerationRequest):
        _check_combinations(request)
    return request


#: Members that change what an answer is, so that no answer may ignore them.
DECISIVE: Final = (
    "tools", "functions", "response_format", "modalities", "logprobs", "logit_bias", "frequency_penalty",
    "presence_penalty", "suffix",
)  # fmt: skip


def require_honoured(request: TypedRequest, honours: Container[str]) -> None:
    """Raise ``BadRequest`` if a decisive member has an effect and is none of those that the model honours."""
    for name in DECISIVE:
        value = getattr(request, name, None)
        is_zero = value == 0 and type(value) is int and name == "logprobs"  # the chosen tokens alone
        is_used = is_zero or (value and value not in ({"type": "text"}, ["text"]))
        if is_used and name not in honours:
            raise BadRequest("this model does not honour it", name)


def request_for_each_answer(request: _GenerationRequest) -> list[Any]:
    """Return a copy of the request for each answer, starting with all answers of the first prompt."""
    made: list[Any] = []
    prompts: list[dict[str, Any]] = [{}]
    if isinstance(request, CompletionRequest):
        prompts = [{"prompts": [one]} for one in request.prompts]
    for prompt in prompts:
        for number in range(request.n):
            seed = request.seed + number if request.seed is not None else None
            made.append(request.model_copy(update={**prompt, "n": 1, "seed": seed}))
    return made


def _check_combinations(request: _GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("expected only where stream is true", "stream_options")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("expected only where logprobs is true", "top_logprobs")
        return
    assert isinstance(request, CompletionRequest)
    if request.best_of is not None and request.best_of > request.n:
        raise BadRequest("all generated answers are returned: expected at most n", "best_of")
    if (n := len(request.prompts) * request.n) > MAX_CHOICES:
        raise BadRequest(f"expected at most {MAX_CHOICES} answers, prompts times n, given {n}", "prompt")
    if request.echo and not all(isinstance(one, str) for one in request.prompts):
        raise BadRequest("only a prompt of text can be echoed", "echo")
    if request.echo and (n := sum(map(len, request.prompts)) * request.n) > MAX_ECHOED_CHARACTERS:
        text = f"expected at most {MAX_ECHOED_CHARACTERS} characters of prompts times n, given {n}"
        raise BadRequest(text, "echo")


#: The texts of pydantic's errors by type, with the values of their context.
_TEXTS: Final = {
    "value_error": "{error}",
    "missing": "field required",
    "string_type": "expected a string",
    "string_too_long": "expected at most {max_length} characters",
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "dict_type": "expected an object",
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "literal_error": "expected {expected}",
    "greater_than_equal": "expected at least {ge:g}",
    "less_than_equal": "expected at most {le:g}",
    "too_short": "expected a list of at least {min_length}",
}


def _bad_request_of(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    text = _TEXTS.get(first["type"], "not valid").format_map(first.get("ctx", {}))
    if first["type"] not in {"missing", "value_error"}:
        text += f", given {_shown(first['input'])}"
    return BadRequest(text, ".".join([str(one)[:_SHOWN_CHARACTERS] for one in first["loc"]]))


def _as_text(given: Prompt, member: str) -> str:
    if not isinstance(given, str):
        raise BadRequest("this model takes text, not tokens", member)
    return given
