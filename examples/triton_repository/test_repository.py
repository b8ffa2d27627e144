"""Both ``model.py`` files, as Triton's backend would run them."""

from __future__ import annotations

import pytest

from gpuserve.testing import ModelCallError, TestClient

pytestmark = pytest.mark.gpuserve("models")


def test_words_are_counted(gpuserve_client: TestClient) -> None:
    assert gpuserve_client.infer("words", text=[["one two three"], ["four"]])["count"].tolist() == [[3], [1]]
    with pytest.raises(ModelCallError, match="a text is empty") as refused:
        gpuserve_client.infer("words", text=[[""]])
    assert refused.value.code.value == "INVALID_ARGUMENT"


def test_letters_come_one_by_one_and_know_the_words(gpuserve_client: TestClient) -> None:
    letters = list(gpuserve_client.stream("letters", text=["a b"]))
    assert [one["letter"][0] for one in letters] == [b"a", b" ", b"b"]
    assert {int(one["words"][0]) for one in letters} == {2}
