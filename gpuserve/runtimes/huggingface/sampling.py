"""How the next token of each row of a batch is chosen, each row by its own settings: transformers computes
with them, and noise of the row's own generator makes the likeliest token of what is left a random one
(Gumbel's way). So rows with any settings share a batch, and a seed gives the same text beside whichever
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuserve.runtimes.huggingface.prompts import Sampling


class RowSampling:
    """A logits processor of transformers over the rows of one batch."""

    def __init__(self, samplings: Sequence[Sampling], device: Any) -> None:
        self._rows = [_Row(one, device) for one in samplings]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for number, row in enumerate(self._rows):
            if not row.is_plain:
                scores[number] = row.scores(input_ids[number : number + 1], scores[number : number + 1])[0]
        return scores


class _Row:
    def __init__(self, sampling: Sampling, device: Any) -> None:
        self._steps = _steps(sampling)
        self._generator = _generator(sampling, device) if sampling.temperature else None
        self.is_plain = not self._steps and self._generator is None

    def scores(self, input_ids: Any, scores: Any) -> Any:
        for step in self._steps:
            scores = step(input_ids, scores)
        if self._generator is None:
            return scores
        import torch

        noise = torch.empty_like(scores).exponential_(generator=self._generator).log_()
        return scores - noise


def _steps(sampling: Sampling) -> list[Any]:
    """What transformers does for these settings, in its order."""
    from transformers.generation import logits_process as known

    steps: list[Any] = []
    if sampling.repetition_penalty != 1:
        steps.append(known.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.temperature:
        return steps
    if sampling.temperature != 1:
        steps.append(known.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(known.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(known.TopPLogitsWarper(max(sampling.top_p, 1e-6)))
    return steps


def _generator(sampling: Sampling, device: Any) -> Any:
    import torch

    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator
