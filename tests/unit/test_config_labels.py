"""Labels in a config file: what they come to, and every mistake at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_file import load_text, problems_of

from gpuserve.model.spec import LabelSpec

MODEL = """\
models:
  - name: m
    callable: pkg.mod:f
    inputs: [{name: x, dtype: FP32, shape: [1]}]
    outputs:
      - {name: y, dtype: FP32, shape: [3], %s}
      - {name: z, dtype: FP32, shape: [3]}
"""


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        ("labels: [cat, dog]", (LabelSpec("y", ("cat", "dog")),)),
        ("label_filename: labels.txt", (LabelSpec("y", ("cat", "Hündin"), "labels.txt"),)),
        ("labels: []", ()),
    ],
)
def test_a_list_or_a_file_beside_the_config(tmp_path: Path, keys: str, labels: tuple[LabelSpec, ...]) -> None:
    (tmp_path / "labels.txt").write_text("cat\nHündin\n", encoding="utf-8")
    assert load_text(tmp_path, MODEL % keys).models[0].labels == labels


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("labels: [cat], label_filename: labels.txt", "output 'y' has labels and label_filename, expected"),
        ("label_filename: none.txt", "output 'y': the file cannot be read: No such file or directory"),
        ("label_filename: binary.txt", "output 'y': the file is no UTF-8"),
        ("labels: [1]", "labels[0]"),
        ("labels: cat", "labels"),
    ],
)
def test_mistakes(tmp_path: Path, keys: str, text: str) -> None:
    (tmp_path / "labels.txt").write_text("cat\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\n")
    (problem,) = problems_of(tmp_path, MODEL % keys)
    assert problem.startswith("config.yaml:6:")
    assert text in problem


def test_inputs_have_none(tmp_path: Path) -> None:
    text = (MODEL % "labels: []").replace("shape: [1]}]", "shape: [1], labels: [a]}]")
    assert "labels" in problems_of(tmp_path, text)[0]
