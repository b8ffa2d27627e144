"""Rows of generated text that join and leave between steps, over the KV cache of transformers.

Each row has a slot of the cache (``slot_cache.py``), and a mask hides the places behind its tokens. A row
joins when its prompt has been computed beside the others; when it ends, the last row gets its slot. A long
prompt is computed in pieces, one before each step, so that the other rows go on.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

#: The most tokens of a prompt that are computed at once.
PIECE_TOKENS: Final = 512
#: Options of a generation_config.json that a step honours, or that say nothing about the choice of a token.
_KNOWN_OPTIONS: Final = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
        *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p"),
        *("repetition_penalty", "use_cache", "num_beams", "output_attentions", "output_hidden_states"),
    }
)


class Row(Protocol):
    """A row of text. ``over``: it gets no more tokens."""

    over: bool

    @property
    def tokens(self) -> Sequence[int]:
        """Return the tokens of the prompt."""

    def note_scores(self, scores: Any) -> None:
        """Note the model's scores [vocabulary] of the next token, before the row's own settings apply."""

    def add_token(self, token: int) -> None:
        """Add the next token of the row."""

    def fail(self, error: Exception) -> None:
        """End the row with an error."""


#: Chooses the next token of a row from its tokens [1, length] and the scores [1, vocabulary].
Choose = Callable[[Any, Any], Any]


def can_step(model: Any, options: Any) -> bool:
    """Return whether rows can join a model's cache: its layers keep all tokens, and no option of the
    ``generation_config`` needs more than a row's own tokens.
    """
    from transformers import DynamicCache

    parameters = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder or not {"attention_mask", "position_ids"} <= parameters.keys():
        return False
    if not {name for name in options.to_diff_dict() if not name.startswith("_")} <= _KNOWN_OPTIONS:
        return False
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, TypeError):  # before transformers 4.56
        return False
    return {type(one).__name__ for one in layers} == {"DynamicLayer"}


def padded_prompts(prompts: Sequence[Sequence[int]], pad: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts as rows of one length, padded on the left, and the mask of their tokens."""
    longest = max(map(len, prompts))
    gaps = [longest - len(one) for one in prompts]
    tokens = [[pad] * gap + list(one) for gap, one in zip(gaps, prompts, strict=True)]
    return tokens, [[0] * gap + [1] * (longest - gap) for gap in gaps]


class StepRows:
    """The rows that a model computes together. ``choices`` has a chooser for each row that is not greedy."""

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.rows: list[Row] = []
        self._choices: list[Choose | None] = []
        #: Rows whose prompts are long, in order, and the cache of the first one's prompt.
        self._long: deque[tuple[Row, Choose | None]] = deque()
        self._piece_cache: Any = None
        self._cache: Any = None
        self._tokens: list[list[int]] = []

    @property
    def all_rows(self) -> list[Row]:
        """All rows, also those whose prompts are not computed yet."""
        return [*self.rows, *[row for row, _ in self._long]]

    def join(self, rows: Sequence[Row], choices: Sequence[Choose | None]) -> None:
        """Compute the prompts of new rows, and add their first tokens. Steps compute long prompts."""
        chosen = list(zip(rows, choices, strict=True))
        self._long += [one for one in chosen if len(one[0].tokens) > PIECE_TOKENS]
        short = [one for one in chosen if len(one[0].tokens) <= PIECE_TOKENS]
        if short:
            self._join_short(*zip(*short, strict=True))

    def _join_short(self, rows: Sequence[Row], choices: Sequence[Choose | None]) -> None:
        import torch
        from transformers import DynamicCache

        device = self._model.device
        tokens, places = padded_prompts([one.tokens for one in rows], 0)
        mask = torch.tensor(places, device=device)
        cache = DynamicCache(config=self._model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        scores = self._compute(torch.tensor(tokens, device=device), mask, positions, cache)
        self._merge(rows, choices, cache, scores)

    def _compute_piece(self) -> None:
        """Compute the next piece of the first long prompt, whose row joins with its last piece."""
        import torch
        from transformers import DynamicCache

        row, choose = self._long[0]
        if self._piece_cache is None:
            self._piece_cache = DynamicCache(config=self._model.config)
        cache = self._piece_cache
        start = cache.get_seq_length()
        tokens = torch.tensor([row.tokens[start : start + PIECE_TOKENS]], device=self._model.device)
        end = start + tokens.shape[1]
        places = torch.arange(end, device=self._model.device)[None]
        mask = torch.ones_like(places)
        scores = None if row.over else self._compute(tokens, mask, places[:, start:], cache)
        if row.over or end == len(row.tokens):
            self._long.popleft()
            self._piece_cache = None
            if not row.over:
                self._merge([row], [choose], cache, scores)

    def _merge(self, rows: Sequence[Row], choices: Sequence[Choose | None], cache: Any, scores: Any) -> None:
        """Add rows whose prompts are computed, and the tokens that follow from the scores."""
        from transformers import DynamicCache

        from gpuserve.backends.huggingface.slot_cache import SlotLayer

        if self._cache is None:
            self._cache = DynamicCache()
            self._cache.layers = [SlotLayer() for _ in cache.layers]
        first = len(self.rows)
        self.rows += rows
        self._choices += choices
        self._tokens += [list(one.tokens) for one in rows]
        self._fit(cache)
        for ours, new in zip(self._cache.layers, cache.layers, strict=True):
            for at, row in enumerate(rows):
                ours.copy(first + at, new, at, slice(-len(row.tokens), None))
        self._add(first, scores)

    def _fit(self, like: Any) -> None:
        """Fit the slots to the rows and their next tokens. The tensors are like those of a cache."""
        width = max(map(len, self._tokens))
        for ours, one in zip(self._cache.layers, like.layers, strict=True):
            ours.fit(len(self.rows), width, one)

    def step(self) -> None:
        """Compute a piece of a long prompt, and the next token of each row."""
        import torch

        if self._long:
            self._compute_piece()
        if not self.rows:
            return
        self._fit(self._cache)
        device = self._model.device
        last = torch.tensor([[one[-1]] for one in self._tokens], device=device)
        places = torch.tensor([len(one) - 1 for one in self._tokens], device=device)
        width, rows = max(map(len, self._tokens)), torch.arange(len(self.rows), device=device)
        for layer in self._cache.layers:
            layer.rows, layer.places, layer.width = rows, places, width
        mask = (torch.arange(width, device=device) <= places[:, None]).long()
        self._add(0, self._compute(last, mask, places[:, None], self._cache))

    def clear(self) -> None:
        """Remove all rows."""
        self._long.clear()
        self._piece_cache = None
        self._clear_cache()

    def _clear_cache(self) -> None:
        self.rows, self._choices, self._tokens = [], [], []
        self._cache = None

    def _compute(self, tokens: Any, mask: Any, positions: Any, cache: Any) -> Any:
        """Return the scores of the token after the last one of each row."""
        found = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
            **self._last_only,
        )
        return found.logits[:, -1].float()

    def _add(self, first: int, scores: Any) -> None:
        """Add the tokens that follow from the scores to the rows from ``first`` on, and let rows leave."""
        import torch

        for at, (row, choose) in enumerate(zip(self.rows[first:], self._choices[first:], strict=True)):
            row.note_scores(scores[at])
            if choose is not None:
                known = torch.tensor([self._tokens[first + at]], device=scores.device)
                scores[at] = choose(known, scores[at : at + 1])[0]
        for at, token in enumerate(scores.argmax(-1).tolist(), first):
            self._tokens[at].append(token)
            self.rows[at].add_token(token)
        for at in reversed(range(len(self.rows))):
            if self.rows[at].over:
                self._remove(at)
        if not self.rows:
            self._clear_cache()

    def _remove(self, at: int) -> None:
        """Remove a row; the last one gets its slot."""
        last = len(self.rows) - 1
        if at < last:
            for layer in self._cache.layers:
                layer.copy(at, layer, last, slice(len(self._tokens[last]) - 1))
        lists: tuple[list[Any], ...] = (self.rows, self._choices, self._tokens)
        for each in lists:
            each[at] = each[-1]
            each.pop()
