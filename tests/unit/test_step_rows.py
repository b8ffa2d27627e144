"""Rows of generated text that join and leave between steps have the tokens that they have alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from optional_packages import needs

from gpuserve.backends.huggingface.step_rows import PIECE_TOKENS, StepRows, can_step

pytestmark = needs("torch", "transformers")
SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
MORE = {"intermediate_size": 32, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}


def model(kind: str, **more: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {**SIZES, **MORE, **more}
    if kind == "GPT2":
        sizes = {"vocab_size": 64, "n_positions": 2048, "n_layer": 2, "n_head": 2, "n_embd": 16}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes, initializer_range=0.5)
    made = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, made)(config).eval()


class Row:
    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self.tokens = tokens
        self.made: list[int] = []
        self._limit = limit
        self.over = False
        self.is_chosen = False

    def note_scores(self, scores: Any) -> None:
        self.scores = scores.clone()

    def add_token(self, token: int) -> None:
        assert int(self.scores.argmax()) == token or self.is_chosen
        assert not self.over
        self.made.append(token)
        self.over = len(self.made) == self._limit

    def fail(self, error: Exception) -> None:
        raise error


def alone(made: Any, row: Row, count: int) -> list[int]:
    import torch

    tokens = torch.tensor([row.tokens])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    found = made.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return [int(one) for one in found[0, len(row.tokens) :]]


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_rows_that_join_at_any_step_have_their_own_tokens(kind: str) -> None:
    import torch

    made = model(kind)
    assert can_step(made, made.generation_config)
    limits = {3: 30, 9: 4, 1: 12, 14: 1, 5: 7}  # by the length of the prompt
    rows = [Row([(7 * at + length) % 64 for at in range(length)], limit) for length, limit in limits.items()]
    arrivals = {0: rows[:1], 2: rows[1:4], 5: rows[4:]}
    running, sizes = StepRows(made), []
    with torch.inference_mode():
        for at in range(40):
            if at in arrivals:
                running.join(arrivals[at], [None] * len(arrivals[at]))
            sizes.append(len(running.rows))
            if running.rows:
                running.step()
    for row, limit in zip(rows, limits.values(), strict=True):
        assert row.made == alone(made, row, limit)
    assert (max(sizes), sizes[-1]) == (3, 0)  # the row with one token never stays


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_long_prompt_is_computed_in_pieces_beside_rows_that_go_on(kind: str) -> None:
    import torch

    n_steps = -(-1200 // PIECE_TOKENS)
    made = model(kind, max_position_embeddings=2048)
    going, left, long, short = Row([3, 1], 300), Row([1] * 900, 9), Row([], 5), Row([7, 7, 7], 4)
    long.tokens = [(5 * at) % 64 for at in range(1200)]
    running = StepRows(made)
    with torch.inference_mode():
        running.join([going], [None])
        running.join([left, long], [None, None])
        left.over = True
        for at in range(1 + n_steps):
            assert not long.made
            if at == 2:
                running.join([short], [None])  # does not wait for the long prompt
                assert len(short.made) == 1
            running.step()
            assert len(going.made) == at + 2
        assert len(long.made) == 2
        while running.all_rows:
            running.step()
    assert (left.made, len(short.made)) == ([], 4)
    for row, count in ((going, 300), (long, 5), (short, 4)):
        assert row.made == alone(made, row, count)


def test_a_chooser_sees_the_tokens_of_its_row_alone() -> None:
    import torch

    seen = []

    def choose(tokens: Any, scores: Any) -> Any:
        seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(torch.tensor([9]), scores.shape[-1]).float()

    rows = [Row([1, 2, 3, 4], 3), Row([5], 3)]
    rows[1].is_chosen = True
    running = StepRows(model("Llama"))
    with torch.inference_mode():
        running.join(rows, [None, choose])
        while running.rows:
            running.step()
    assert rows[1].made == [9, 9, 9]
    assert seen == [[5], [5, 9], [5, 9, 9]]


def test_rows_cannot_join_the_cache_of_a_sliding_window_or_with_options_of_whole_batches() -> None:
    sliding = model("Mistral", sliding_window=4)
    assert not can_step(sliding, sliding.generation_config)
    made = model("Llama")
    made.generation_config.no_repeat_ngram_size = 2
    assert not can_step(made, made.generation_config)
