"""Schemas of a ``response_format`` as masks of the next token."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_packages import needs

from gpuserve.backends.huggingface.structured_outputs import JsonGrammars, JsonMask
from gpuserve.core.errors import InvalidArgument

pytestmark = needs("torch", "transformers", "llguidance")
END, VOCABULARY = 0, 300
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["ok", "kinds", "name"],
    "additionalProperties": False,
}


def grammars(end_tokens: Sequence[int] = (END,)) -> JsonGrammars:
    return JsonGrammars(tiny_models.byte_tokenizer(), VOCABULARY, end_tokens)


def matcher(schema: Any = SCHEMA) -> Any:
    return asyncio.run(grammars().matcher_of(schema))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_the_scores_are_the_text_obeys_the_schema(seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    failures: list[Exception] = []
    mask, tokens = JsonMask(matcher(), failures.append), [7, 8]
    while tokens[-1] != END:
        assert len(tokens) < 800, "white space has a limit"
        scores = torch.randn(1, VOCABULARY, generator=generator)
        tokens.append(int(mask(torch.tensor([tokens]), scores).argmax()))
    text = tiny_models.byte_tokenizer().decode(tokens[2:-1])
    jsonschema.validate(json.loads(text), SCHEMA)
    assert not failures


def test_a_row_whose_grammar_fails_ends_with_an_error() -> None:
    import torch

    failures: list[Exception] = []
    mask = JsonMask(matcher(), failures.append)
    for tokens in ([1], [1, 2]):
        mask(torch.tensor([tokens]), torch.zeros(1, VOCABULARY))
    (error,) = failures
    assert str(error).startswith("the answer cannot follow the schema: ")


def test_a_schema_that_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matcher(None) is None, "text has no grammar"
    for schema, said in (({"type": "strin"}, "Invalid type"), ({"not": {}}, "Unimplemented keys")):
        with pytest.raises(InvalidArgument, match=f"followed: {said}"):
            matcher(schema)
    with pytest.raises(InvalidArgument, match="has no end token"):
        asyncio.run(grammars(()).matcher_of(SCHEMA))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'gpuserve\[structured-outputs\]'"):
        matcher()
