"""What a config names travels with it, and nothing else does."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import exported, loaded, written
from manifests import only

from gpuserve.cli.export.config_bundle import MAX_BUNDLE_NBYTES, bundle_config
from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems


def in_folder(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_callable_comes_with_the_modules_beside_it(tmp_path: Path) -> None:
    in_folder(
        tmp_path,
        first="import os, second\ndef first(r):\n    from parts.deep import two\n",
        second="from third import three\n",
        third="three = 3\n",
        other="nobody imports this\n",
        parts__deep="from . import near\n",
        parts__near="",
    )
    (tmp_path / "parts" / "__init__.py").write_text("")
    found = bundle_config(loaded(tmp_path, {"callable": "first.py:first"}))
    assert set(found.contents) == {
        "config.yaml", "first.py", "second.py", "third.py",
        "parts/__init__.py", "parts/deep.py", "parts/near.py",
    }  # fmt: skip


def test_a_module_beside_the_config_comes_too(tmp_path: Path) -> None:
    in_folder(tmp_path, package__model="def double(r): ...\n")
    found = bundle_config(loaded(tmp_path, {"callable": "package.model:double"}))
    assert set(found.contents) == {"config.yaml", "package/model.py"}


def test_a_module_of_the_image_does_not(tmp_path: Path) -> None:
    assert set(bundle_config(loaded(tmp_path, {"callable": "json.decoder:JSONDecoder"})).contents) == {
        "config.yaml"
    }


def test_a_name_on_the_hub_needs_no_file(tmp_path: Path) -> None:
    assert set(bundle_config(loaded(tmp_path, {"callable": "hf:org/name"})).contents) == {"config.yaml"}


def test_a_folder_of_a_model_belongs_into_the_image(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    with pytest.raises(ConfigProblems) as refused:
        bundle_config(loaded(tmp_path, {"callable": "./bert"}))
    assert (
        "'bert' is a folder, which no ConfigMap can hold: put it into the image and write callable: "
        "gpuserve.backends.huggingface:HuggingFaceModel, kwargs: {file: PATH}"
    ) in str(refused.value)


def test_folders_are_mounted_as_they_are(tmp_path: Path) -> None:
    in_folder(tmp_path, models__double="def double(r): ...\n")
    objects = exported(tmp_path, {"callable": "models/double.py:double"})
    (volume, *_) = only(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["items"][1] == {"key": "models..double.py", "path": "models/double.py"}
    assert only(objects, "ConfigMap")["data"]["models..double.py"] == "def double(r): ...\n"


def test_labels_and_samples_come_too(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    np.save(tmp_path / "sample.npy", np.zeros((1, 16), np.float32))
    model: dict[str, Any] = {
        "outputs": [{"name": "y", "dtype": "float32", "shape": [2], "label_filename": "labels.txt"}],
        "warmup": [{"name": "first", "inputs": {"x": {"file": "sample.npy"}}}],
    }
    objects = exported(tmp_path, model)
    found = only(objects, "ConfigMap")
    assert found["data"]["labels.txt"] == "cat\ndog\n"
    assert base64.b64decode(found["binaryData"]["sample.npy"]) == (tmp_path / "sample.npy").read_bytes()


def test_another_config_has_another_name(tmp_path: Path) -> None:
    """So that a change is rolled out: pods name what they mount."""
    before = only(exported(tmp_path), "ConfigMap")["metadata"]["name"]
    assert only(exported(tmp_path), "ConfigMap")["metadata"]["name"] == before
    assert only(exported(tmp_path, drain_timeout_s=31), "ConfigMap")["metadata"]["name"] != before


def test_a_token_is_in_a_secret(tmp_path: Path) -> None:
    token = "t0ken-" * 6
    objects = exported(tmp_path, access_token=token, restricted_endpoints=["trace"])
    assert token in only(objects, "Secret")["stringData"]["config.yaml"]
    assert token not in str([one for one in objects if one["kind"] != "Secret"])
    (volume, *_) = only(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"]["secretName"] == only(objects, "Secret")["metadata"]["name"]


def test_what_is_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    in_folder(tmp_path, outside="def double(r): ...\n")
    configuration = loaded(tmp_path / "there", {"callable": "../outside.py:double"})
    with pytest.raises(ConfigProblems, match=r"'\.\./outside\.py' is outside the folder of the config file"):
        bundle_config(configuration)


def refused(folder: Path, *models: dict[str, Any]) -> list[str]:
    """The problems, without where they stand."""
    with pytest.raises(ConfigProblems) as error:
        bundle_config(loaded(folder, *models))
    return [one.message for one in error.value.problems]


def test_what_a_link_leads_to_outside_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    in_folder(tmp_path, secret="def double(r): ...\n")
    (tmp_path / "there" / "linked.py").symlink_to("../secret.py")
    (tmp_path / "there" / "first.py").write_text("import linked\n")
    (found,) = refused(tmp_path / "there", {"callable": "linked.py:double"})
    assert found.startswith("models[0].callable: 'linked.py' leads out of the folder of the config file")
    (found,) = refused(tmp_path / "there", {"callable": "first.py:double"})
    assert found.startswith("models[0].callable: 'linked.py' leads out of the folder of the config file")


def test_a_link_inside_the_folder_is_a_file_like_others(tmp_path: Path) -> None:
    in_folder(tmp_path, real="def double(r): ...\n")
    (tmp_path / "linked.py").symlink_to("real.py")
    found = bundle_config(loaded(tmp_path, {"callable": "linked.py:double"}))
    assert found.contents["linked.py"] == b"def double(r): ...\n"


def test_a_name_that_no_config_map_takes_is_told_with_its_key(tmp_path: Path) -> None:
    in_folder(tmp_path, mödel="def double(r): ...\n")
    (found,) = refused(tmp_path, {"callable": "mödel.py:double"})
    assert found.startswith("models[0].callable: 'mödel.py' cannot be in a ConfigMap: expected letters")


def test_two_files_of_one_key_are_told_apart(tmp_path: Path) -> None:
    in_folder(tmp_path, a__b="def double(r): ...\n")
    (tmp_path / "a..b.py").write_text("def double(r): ...\n")
    (found,) = refused(tmp_path, {"callable": "a/b.py:double"}, {"name": "two", "callable": "a..b.py:double"})
    assert found.startswith("models[1].callable: 'a..b.py' would have the key of 'a/b.py' in the ConfigMap")


def test_a_file_under_the_name_of_the_config_is_not_taken_for_it(tmp_path: Path) -> None:
    model = {"outputs": [{"name": "y", "dtype": "float32", "shape": [2], "label_filename": "config.yaml"}]}
    config = written(tmp_path, model)
    config.rename(tmp_path / "models.yaml")
    (tmp_path / "config.yaml").write_text("cat\ndog\n")
    with pytest.raises(ConfigProblems, match="would have the key of the config"):
        bundle_config(load_file(str(tmp_path / "models.yaml"), {}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    in_folder(tmp_path, locked="def double(r): ...\n")
    (tmp_path / "locked.py").chmod(0)
    (found,) = refused(tmp_path, {"callable": "locked.py:double"})
    assert found == "models[0].callable: 'locked.py' cannot be read: permission denied"


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    in_folder(tmp_path, large=f"# {'x' * MAX_BUNDLE_NBYTES}\n")
    configuration = loaded(tmp_path, {"callable": "large.py:double"})
    with pytest.raises(
        ConfigProblems, match=r"'large\.py' alone has 960 KiB; put it into the image"
    ) as error:
        bundle_config(configuration)
    assert error.value.problems[0].span is not None
