"""Tool calls in the text of a model, read by the response template of its tokenizer. Needs pydantic."""

from __future__ import annotations

import json
from typing import Any

from gpuserve.backends.huggingface.prompt_batches import STOP, TextPiece
from gpuserve.openai import Token, ToolCall


def response_template_of(tokenizer: Any, model: Any) -> Any:
    """Return the response template of a tokenizer, or that of transformers for the model, or None."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # before transformers 5.16
        return None
    return get_response_template(tokenizer, model)


class ToolCallReader:
    """The text and the tool calls of one answer. Text of other regions, such as reasoning, is left out. If a
    call does not have the template's form, the call and everything after it are text. ``parser`` is a
    ``ResponseParser`` of transformers.
    """

    def __init__(self, parser: Any, *, is_parallel: bool) -> None:
        self._parser = parser
        self._is_parallel = is_parallel
        #: The text of an unfinished call.
        self._call_text = ""
        self._n_calls = 0

    def read(self, piece: TextPiece) -> list[Token | ToolCall]:
        """Return the values of an answer for its next piece."""
        text, calls, reason = piece.text, list[ToolCall](), piece.finish_reason
        if self._parser is not None:
            try:
                text, calls = self._parse(piece)
            except (KeyError, TypeError, ValueError):  # what the model wrote
                self._parser, text = None, self._call_text + piece.text
        if not self._is_parallel and calls:
            calls, reason = calls[:1], STOP
        self._n_calls += len(calls)
        if reason == STOP and self._n_calls:
            reason = "tool_calls"
        return [Token(text, 0), *calls, Token("", piece.tokens, reason)]

    def _parse(self, piece: TextPiece) -> tuple[str, list[ToolCall]]:
        events = self._parser.feed(piece.text)
        if piece.finish_reason:
            events += self._parser.finalize()[1]
        text, calls = "", list[ToolCall]()
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_chunk" and field == "content":
                text += event["text"]
            elif kind == "region_chunk" and field == "tool_calls":
                self._call_text += event["text"]
            elif kind == "region_close" and field == "tool_calls":
                found = event["value"]
                for one in found if isinstance(found, list) else [found]:
                    name, arguments = str(one["function"]["name"]), one["function"]["arguments"]
                    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
                    calls.append(ToolCall(name, written, index=self._n_calls + len(calls)))
                self._call_text = ""
        return text, calls
