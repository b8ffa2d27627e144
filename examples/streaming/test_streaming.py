"""Stories come word by word, and both writers tell the same."""

from __future__ import annotations

import numpy as np
import pytest

from gpuserve.testing import TestClient

pytestmark = pytest.mark.gpuserve("config.yaml")


@pytest.mark.parametrize("model", ["words", "slow_words"])
def test_as_many_words_as_were_asked_for(gpuserve_client: TestClient, model: str) -> None:
    story = gpuserve_client.stream(model, prompt=[["The"]], count=np.array([[3]], np.int32))
    assert len([one["word"][0, 0] for one in story]) == 3


def test_a_reader_may_leave(gpuserve_client: TestClient) -> None:
    story = gpuserve_client.stream("slow_words", prompt=[["The"]], count=np.array([[1000]], np.int32))
    first = next(story)["word"][0, 0]
    story.close()
    again = gpuserve_client.stream("words", prompt=[["The"]], count=np.array([[1]], np.int32))
    assert [one["word"][0, 0] for one in again] == [first]
