"""Rows of generated text that join and leave between steps, over the KV cache of transformers.

The tokens of each row are at the right end of the cache, and a mask hides the columns before them. A row
joins when its prompt has been computed beside the others, and its part of the cache goes when it ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

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


class StepRows:
    """The rows that a model computes together. ``choices`` has a chooser for each row that is not greedy."""

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.rows: list[Row] = []
        self._choices: list[Choose | None] = []
        self._cache: Any = None
        self._mask: Any = None
        self._tokens: list[list[int]] = []

    def join(self, rows: Sequence[Row], choices: Sequence[Choose | None]) -> None:
        """Compute the prompts of new rows, and add their first tokens."""
        import torch
        from transformers import DynamicCache

        prompts = [list(one.tokens) for one in rows]
        longest = max(map(len, prompts))
        gaps = [longest - len(one) for one in prompts]
        device = self._model.device
        tokens = [[0] * gap + one for gap, one in zip(gaps, prompts, strict=True)]
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps], device=device)
        cache = DynamicCache(config=self._model.config)
        scores = self._compute(torch.tensor(tokens, device=device), mask, cache)
        if self.rows:
            self._mask = torch.cat(_aligned(self._mask, mask, 1))
            for ours, new in zip(self._cache.layers, cache.layers, strict=True):
                ours.keys = torch.cat(_aligned(ours.keys, new.keys, 2))
                ours.values = torch.cat(_aligned(ours.values, new.values, 2))
        else:
            self._cache, self._mask = cache, mask
        first = len(self.rows)
        self.rows += rows
        self._choices += choices
        self._tokens += prompts
        self._add(first, scores)

    def step(self) -> None:
        """Compute the next token of each row."""
        import torch

        last = torch.tensor([[one[-1]] for one in self._tokens], device=self._model.device)
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self._add(0, self._compute(last, self._mask, self._cache))

    def clear(self) -> None:
        self.rows, self._choices, self._tokens = [], [], []
        self._cache = self._mask = None

    def _compute(self, tokens: Any, mask: Any, cache: Any) -> Any:
        """Return the scores of the token after the last one of each row."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
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

        for at, choose in enumerate(self._choices[first:]):
            if choose is not None:
                known = torch.tensor([self._tokens[first + at]], device=scores.device)
                scores[at] = choose(known, scores[at : at + 1])[0]
        for at, token in enumerate(scores.argmax(-1).tolist(), first):
            self._tokens[at].append(token)
            self.rows[at].add_token(token)
        stays = [at for at, one in enumerate(self.rows) if not one.over]
        if not stays:
            self.clear()
        elif len(stays) < len(self.rows):
            self._keep(stays)

    def _keep(self, stays: Sequence[int]) -> None:
        """Remove the other rows, and the columns that only they had."""
        import torch

        self.rows = [self.rows[at] for at in stays]
        self._choices = [self._choices[at] for at in stays]
        self._tokens = [self._tokens[at] for at in stays]
        index = torch.tensor(stays, device=self._mask.device)
        unused = int((self._mask[index].cumsum(1) == 0).sum(1).min())
        self._mask = self._mask[index][:, unused:]
        for one in self._cache.layers:
            one.keys, one.values = one.keys[index][:, :, unused:], one.values[index][:, :, unused:]


def _aligned(ours: Any, new: Any, axis: int) -> tuple[Any, Any]:
    """Return both tensors with the length of the longer one, padded with zeros on the left of an axis."""
    import torch

    behind = 2 * (ours.ndim - 1 - axis)
    length = max(ours.shape[axis], new.shape[axis])
    ours, new = (
        torch.nn.functional.pad(one, (*[0] * behind, length - one.shape[axis], 0)) for one in (ours, new)
    )
    return ours, new
