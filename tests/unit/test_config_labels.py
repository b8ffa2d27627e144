"""Labels in a config file: what they come to, and every mistake at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems
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


def labels(tmp_path: Path, keys: str) -> tuple[LabelSpec, ...]:
    file = tmp_path / "config.yaml"
    file.write_text(MODEL % keys)
    return load_file(str(file), {}).models[0].labels


def problems(tmp_path: Path, keys: str) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        labels(tmp_path, keys)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_a_list(tmp_path: Path) -> None:
    assert labels(tmp_path, "labels: [cat, dog]") == (LabelSpec("y", ("cat", "dog")),)


def test_a_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\nHündin\n", encoding="utf-8")
    assert labels(tmp_path, "label_filename: labels.txt") == (
        LabelSpec("y", ("cat", "Hündin"), "labels.txt"),
    )


def test_none(tmp_path: Path) -> None:
    assert labels(tmp_path, "labels: []") == ()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            "labels: [cat], label_filename: labels.txt",
            "output 'y' has labels and label_filename, expected one",
        ),
        ("label_filename: none.txt", "output 'y': the file cannot be read: No such file or directory"),
        ("label_filename: binary.txt", "output 'y': the file is no UTF-8"),
        ("labels: [1]", "labels[0]"),
        ("labels: cat", "labels"),
    ],
)
def test_mistakes(tmp_path: Path, keys: str, text: str) -> None:
    (tmp_path / "labels.txt").write_text("cat\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\n")
    (problem,) = problems(tmp_path, keys)
    assert problem.startswith("config.yaml:6:")
    assert text in problem


def test_inputs_have_none(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text((MODEL % "labels: []").replace("shape: [1]}]", "shape: [1], labels: [a]}]"))
    with pytest.raises(ConfigProblems, match="labels"):
        load_file(str(file), {})
