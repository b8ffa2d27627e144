"""What type checkers say of a program with typed functions: nothing, and what is wrong where it is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import REPOSITORY

PROGRAM = """\
from collections.abc import Iterator
from typing import Annotated, NamedTuple, TypedDict

import numpy as np

from gpuserve import Server
from gpuserve.decorators import first_value
from gpuserve.typed import BFloat16, Bytes, Float32, Int32, Name, Parameter, Shape, batch, sample

Image = Annotated[Float32, Shape(3, 224, 224)]


class Scores(NamedTuple):
    scores: Annotated[Float32, Shape(1000)]
    label: Bytes


class Moments(TypedDict):
    mean: Float32


@batch
def double(x: Float32) -> Float32:
    return 2 * x


@batch(max_batch_size=64)
def classify(image: Image, top: Annotated[Int32, Shape(1)] | None = None, *, k: Parameter[int] = 5) -> Scores:
    flat = image.reshape(len(image), -1)
    return Scores(flat[:, : 1000 - k], np.array([[b"cat"]] * len(flat), object))


@sample
def count(n: Annotated[Int32, Shape(1)]) -> Iterator[Annotated[Int32, Name("i")]]:
    for i in range(int(n[0])):
        yield np.array([i], np.int32)


class Model:
    @batch(max_batch_size=8)
    @first_value("k")
    async def __call__(self, x: Float32, k: Int32) -> Moments:
        return {"mean": x * x}


def halved(x: BFloat16) -> BFloat16:
    return x / 2


scores = classify(np.zeros((1, 3, 224, 224), np.float32), k=3).scores
doubled: Float32 = double(scores)
double("text")  # wrong
classify(scores, k="many")  # wrong
double(x=scores).no_such_attribute  # wrong
batch(max_batch_size="many")  # wrong

with Server(http_port=None) as server:
    server.bind("double", double)
    server.bind("model", Model())
"""


@pytest.mark.thorough
def test_mypy_takes_the_program_and_knows_its_signatures(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}/cache"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        env={"MYPYPATH": str(REPOSITORY), "PATH": "/usr/bin"},
    )
    found = [int(one) for one in re.findall(r"program\.py:(\d+): error", done.stdout)]
    lines = enumerate(PROGRAM.splitlines(), start=1)
    assert found == [n for n, line in lines if "# wrong" in line], done.stdout
