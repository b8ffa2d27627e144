"""Parameters of requests come in and go out, and one wrong request does not spoil its batch."""

from __future__ import annotations

import pytest

from gpuserve.testing import ModelCallError, TestClient

pytestmark = pytest.mark.gpuserve("config.yaml")


def test_in_the_language_that_is_asked_for(gpuserve_client: TestClient) -> None:
    greeted = gpuserve_client.infer("greeting", name=[["ada "]], parameters={"language": "de"})
    assert greeted["greeting"].tolist() == [[b"Guten Tag, Ada (nobody)"]]
    assert greeted.parameters == {"language": "de", "names": 1}


def test_an_unknown_language(gpuserve_client: TestClient) -> None:
    with pytest.raises(ModelCallError, match="language must be one of en, de, ja, got 'fr'") as refused:
        gpuserve_client.infer("greeting", name=[["ada"]], parameters={"language": "fr"})
    assert refused.value.code.value == "INVALID_ARGUMENT"
