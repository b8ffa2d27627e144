"""Model files that try to run code, or to reach files of the machine, when they are checked, described or
served. Each payload creates a file or a folder. A control of each kind shows that the payload works where the
operator says that the file is trusted, or where the library is used carelessly.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import openai
import pytest
import skops.io
import tiny_models
import torch
from attack_payload import Payload
from config_file import served, write_config
from processes import finished
from serving import GPUSERVE
from sklearn.preprocessing import FunctionTransformer

from gpuserve.backends.huggingface import HuggingFaceModel
from gpuserve.backends.model_files import ModelFileError
from gpuserve.backends.pytorch import PytorchModel
from gpuserve.backends.sklearn import SklearnModel

pytestmark = pytest.mark.thorough  # the libraries take seconds to import; test_attack_pickles.py needs none
TENSORS = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
    "outputs": [{"name": "OUTPUT__0", "dtype": "float32", "shape": [-1]}],
}


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Saves(torch.nn.Module):
    """A program that writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> str:
        return self.path

    @torch.jit.export
    def __setstate__(self, state: str) -> None:
        self.path = state
        self.training = False
        torch.save([state], state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def known_types(folder: Path, mark: Path) -> str:
    skops.io.dump(FunctionTransformer(Path.touch).fit([[mark]]), folder / "model.skops")
    return "model.skops"


def exported(folder: Path, change: Callable[[str, bytes], bytes]) -> str:
    """A program of torch.export, with the records of its archive changed."""
    sizes = {"x": {0: torch.export.Dim("n", max=8)}}
    program = torch.export.export(Double(), (torch.ones(3, 4),), dynamic_shapes=sizes)
    good = io.BytesIO()
    torch.export.save(program, good)
    with zipfile.ZipFile(good) as given, zipfile.ZipFile(folder / "model.pt2", "w") as made:
        for record in given.namelist():
            made.writestr(record, change(record, given.read(record)))
    return "model.pt2"


def exported_pickle(folder: Path, mark: Path) -> str:
    def change(record: str, content: bytes) -> bytes:
        if "sample_inputs" not in record:
            return content
        attack = io.BytesIO()
        torch.save((Payload(mark),), attack)
        return attack.getvalue()

    return exported(folder, change)


def exported_expression(folder: Path, mark: Path) -> str:
    def change(record: str, content: bytes) -> bytes:
        size = json.dumps(f"sympify.__globals__['__builtins__']['open']({str(mark)!r}, 'w').write('1')")
        return re.sub(rb"\"Symbol\('s\d+'[^\"]*\"", lambda _: size.encode(), content)

    return exported(folder, change)


def script(folder: Path, mark: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        torch.jit.script(Saves(str(mark))).save(folder / "model.pt")
    mark.unlink(missing_ok=True)
    return "model.pt"


def weights(folder: Path, mark: Path, name: str = "weights.pt", zipped: bool = True) -> str:
    torch.save({"w": Payload(mark)}, folder / name, _use_new_zipfile_serialization=zipped)
    return name


def old_weights(folder: Path, mark: Path) -> str:
    return weights(folder, mark, "weights.pth", zipped=False)


def huggingface_weights(folder: Path, mark: Path) -> str:
    made = tiny_models.text_classifier(folder / "model")
    (made / "model.safetensors").unlink()
    weights(made, mark, "pytorch_model.bin")
    return "./model"


def huggingface_safetensors(folder: Path, mark: Path) -> str:
    made = tiny_models.text_classifier(folder / "model")
    weights(made, mark, "model.safetensors")
    return "./model"


def _with_code(made: Path, mark: Path, file: str, **said: str) -> str:
    (made / "attack.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    config = json.loads((made / file).read_text())
    config["auto_map"] = said
    if file == "config.json":
        config["model_type"] = "attack"
    (made / file).write_text(json.dumps(config))
    return "./model"


def huggingface_code(folder: Path, mark: Path) -> str:
    made = tiny_models.text_classifier(folder / "model")
    said = {"AutoConfig": "attack.Config", "AutoModelForSequenceClassification": "attack.Model"}
    return _with_code(made, mark, "config.json", **said)


class Kind(NamedTuple):
    """A kind of attack: what writes the file, the class that serves it, what is said of the file, and keyword
    arguments with which the payload does run.
    """

    write: Callable[[Path, Path], str]
    runtime: Any
    said: str
    trusting: dict[str, Any] | None = {"trust": True}  # noqa: RUF012


KINDS = [
    Kind(known_types, SklearnModel, "types that are not known to be harmless: pathlib", None),
    Kind(exported_pickle, PytorchModel, "is a program of torch.export, and loading one runs whatever code"),
    Kind(exported_expression, PytorchModel, "is a program of torch.export, and loading one runs whatever"),
    Kind(script, PytorchModel, "is TorchScript that uses 'save', which can read and write files"),
    Kind(weights, PytorchModel, "expected TorchScript; weights alone", None),
    Kind(old_weights, PytorchModel, "expected TorchScript; weights alone", None),
]
SLOW_KINDS = [
    Kind(huggingface_weights, HuggingFaceModel, "cannot be loaded for text-classification", None),
    Kind(huggingface_safetensors, HuggingFaceModel, "cannot be loaded for text-classification", None),
    Kind(
        huggingface_code,
        HuggingFaceModel,
        "cannot be loaded for text-classification",
        {"trust_remote_code": True},
    ),
]
ALL_KINDS = [pytest.param(one, id=one.write.__name__) for one in (*KINDS, *SLOW_KINDS)]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a payload creates."""
    return tmp_path / "created"


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("said", [{}, {"trust": "yes"}, {"trust": 1}], ids=["nothing", "yes", "1"])
def test_an_attack_file_runs_no_code_when_it_is_loaded(
    tmp_path: Path, mark: Path, kind: Kind, said: dict[str, Any]
) -> None:
    if kind.trusting is None or "trust_remote_code" in kind.trusting:
        said = {}
    file = str(tmp_path / kind.write(tmp_path, mark))
    with pytest.raises(ModelFileError) as refused:
        kind.runtime(file=file, **said)
    assert kind.said in str(refused.value)
    if kind.runtime is not HuggingFaceModel:  # whose description reads config.json alone
        with pytest.raises(ModelFileError):
            kind.runtime.declare(file=file, **said)
    else:
        kind.runtime.declare(file=file, **said)
    assert not mark.exists()


@pytest.mark.parametrize("kind", [one for one in ALL_KINDS if one.values[0].trusting is not None])
def test_the_attack_runs_where_the_file_is_trusted(tmp_path: Path, mark: Path, kind: Kind) -> None:
    file = str(tmp_path / kind.write(tmp_path, mark))
    with contextlib.suppress(ModelFileError):  # a file may be good for no more than its attack
        kind.runtime(file=file, **(kind.trusting or {}))
    assert mark.exists()


@pytest.mark.parametrize("write", [weights, old_weights])
def test_the_attack_in_weights_runs_where_they_are_read_carelessly(
    tmp_path: Path, mark: Path, write: Callable[[Path, Path], str]
) -> None:
    torch.load(tmp_path / write(tmp_path, mark), weights_only=False)
    assert mark.exists()


def test_trust_remote_code_is_a_truth_value(tmp_path: Path) -> None:
    made = tiny_models.text_classifier(tmp_path / "model")
    with pytest.raises(ModelFileError, match="trust_remote_code is true or false, got 'false'"):
        HuggingFaceModel.declare(file=str(made), trust_remote_code="false")


# ---- by the command line, and served ------------------------------------------------------------


def test_check_runs_no_attack_and_says_what_to_do(tmp_path: Path, mark: Path) -> None:
    entries = []
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = kind.write(folder, mark)
        entries.append({"name": f"m{number}", "callable": f"{number}/{file}"})
    command = [GPUSERVE, "check", str(write_config(tmp_path, entries))]
    checked = finished(command)
    assert checked.returncode != 0
    for kind in KINDS:
        assert kind.said in " ".join(checked.stderr.split())
    assert checked.stderr.count("set kwargs: {trust: true}, or") == 3
    assert not mark.exists()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_server_runs_no_attack(tmp_path: Path, mark: Path, kind: Kind) -> None:
    # Declared tensors, so that the file is read by a worker first, and not for its description.
    entry = {"name": "m", "callable": kind.write(tmp_path, mark), **TENSORS}
    config = write_config(tmp_path, [entry], host="127.0.0.1", http_port=0, grpc_port=None, metrics_port=None)
    command = [GPUSERVE, "serve", str(config)]
    ended = finished(command)
    assert ended.returncode == 3
    assert kind.said in ended.stderr
    assert not mark.exists()


def test_a_chat_template_reaches_no_python(tmp_path: Path, mark: Path) -> None:
    attack = (
        "{% for one in ''.__class__.__mro__[1].__subclasses__() %}{% if one.__name__ == '_wrap_close' %}"
        f"{{{{ one.__init__.__globals__['mkdir']({str(mark)!r}) }}}}"
        "{% endif %}{% endfor %}"
    )
    made = tiny_models.writer(tmp_path / "model")
    (made / "chat_template.jinja").write_text(attack)
    entry = {"name": "writer", "callable": "./model", "openai": True}
    with served(tmp_path, [entry]) as server:
        messages = [{"role": "user", "content": "good day"}]
        client = openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="-", max_retries=0)
        with client, pytest.raises(openai.BadRequestError, match="the model's template rejects them"):
            client.chat.completions.create(model="writer", messages=messages)
    assert not mark.exists()
    jinja2.Template(attack).render()
    assert mark.exists()
