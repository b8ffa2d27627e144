"""The parrot answers OpenAI's clients, by the server of the test."""

from __future__ import annotations

import json
import urllib.request

import pytest

from gpuserve.testing import TestClient


@pytest.mark.gpuserve("parrot.py:Parrot", openai=True)
def test_a_chat(gpuserve_server: TestClient) -> None:
    asked = {"model": "Parrot", "messages": [{"role": "user", "content": "hello there"}]}
    url = f"{gpuserve_server.addresses['http']}/v1/chat/completions"
    with urllib.request.urlopen(url, json.dumps(asked).encode(), timeout=10) as answer:
        (choice,) = json.load(answer)["choices"]
    assert "hello" in choice["message"]["content"].lower()
