"""A ``model.py`` that cannot be loaded: what its operator is told, in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserve.backends.python_backend.triton_model import TritonModel
from gpuserve_worker.inference.callable_loading import LoadError

RIGHT = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    {execute}
"""
EXECUTE = "def execute(self, requests): pass"


@pytest.fixture(autouse=True)
def _no_traces() -> Iterator[None]:
    """A process has one such model: what it imports is for the next one to import anew."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in [one for one in sys.modules if one.partition(".")[0] == "1" and one not in modules]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "there is no file "),
        (
            "class Model: pass",
            "model.py has no class TritonPythonModel, which is what a model of Triton's Python backend is; "
            "it defines 'Model'",
        ),
        ("import nothing_like_it", "importing model.py raised ModuleNotFoundError: No module named"),
        ("def f(:", "importing model.py raised SyntaxError"),
        (RIGHT.format(initialize="pass", execute=""), "has no method execute(self, requests)"),
        (
            RIGHT.format(initialize="raise ValueError('no weights')", execute=EXECUTE),
            "initialize of model.py raised ValueError: no weights",
        ),
        (
            RIGHT.format(
                initialize="pass",
                execute=f"{EXECUTE}\n    @staticmethod\n    def auto_complete_config(config): return None",
            ),
            "auto_complete_config must return the pb_utils.ModelConfig that it was given, but returned None",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, source: str | None, text: str) -> None:
    (tmp_path / "1").mkdir()
    if source is not None:
        (tmp_path / "1" / "model.py").write_text(source)
    with pytest.raises(LoadError) as refused:
        TritonModel(str(tmp_path))
    assert text in str(refused.value)


def test_neighbours_of_the_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "near_1.py").write_text("WORD = 'near'")
    (tmp_path / "1" / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "above_1.py").write_text("WORD = 'above'")
    imports = "import near_1, above_1\nfrom . import beside\nWORDS = near_1.WORD, beside.WORD, above_1.WORD\n"
    tell = "raise ValueError(WORDS)"
    (tmp_path / "1" / "model.py").write_text(imports + RIGHT.format(initialize=tell, execute=EXECUTE))
    with pytest.raises(LoadError, match="'near', 'beside', 'above'"):
        TritonModel(str(tmp_path))
