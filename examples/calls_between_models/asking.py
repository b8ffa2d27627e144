"""Models that ask others: one after the other, and at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve import Request, current_model
from gpuserve.decorators import batch


@batch
def mood(text: NDArray[np.object_]) -> dict[str, NDArray[Any]]:
    """``text``: bytes [rows, 1], each in its own language. Answers ``mood``: int32 [rows, 1].

    Which model is asked second depends on what the first one says, for each row.
    """
    model = current_model()
    languages = model.infer("language", {"text": text})["language"][:, 0]
    moods = np.zeros(text.shape, np.int32)
    for language in set(languages.tolist()):
        rows = languages == language
        answer = model.infer(f"mood_{language.decode()}", {"text": text[rows]}, timeout_s=5.0)
        moods[rows] = answer["mood"]
    return {"mood": moods}


async def moods(requests: Sequence[Request]) -> list[dict[str, NDArray[Any]]]:
    """What either model says of each request. All of them are asked at the same time."""
    return list(await asyncio.gather(*map(_both, requests)))


async def _both(request: Request) -> dict[str, NDArray[Any]]:
    model, inputs = current_model(), {"text": request["text"]}
    english, german = await asyncio.gather(
        model.infer_async("mood_en", inputs), model.infer_async("mood_de", inputs)
    )
    return {"mood_en": english["mood"], "mood_de": german["mood"]}
