"""Files of scikit-learn as models: what they declare, what they answer, and which are refused."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import estimators
import joblib
import numpy as np
import pytest
import skops.io
from sklearn.cluster import DBSCAN, KMeans
from sklearn.decomposition import PCA
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

from gpuserve.backends.model_files import ModelFileError
from gpuserve.backends.sklearn import SklearnModel
from gpuserve.core.errors import InvalidArgument

pytestmark = pytest.mark.thorough
Saved = Callable[[Any], str]
FLOWERS = estimators.flowers()


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Writes an estimator to a pickle and returns its path."""

    def save(estimator: Any) -> str:
        joblib.dump(estimator, tmp_path / "model.joblib")
        return str(tmp_path / "model.joblib")

    return save


def test_a_skops_file_of_a_classifier_is_declared_with_its_methods(tmp_path: Path) -> None:
    skops.io.dump(estimators.classifier(), tmp_path / "iris.skops")
    labels = ["setosa", "versicolor", "virginica"]
    assert SklearnModel.declare(file=str(tmp_path / "iris.skops")) == {
        "inputs": [{"name": "X", "dtype": "float64", "shape": [4]}],
        "outputs": [
            {"name": "predict", "dtype": "bytes", "shape": [1]},
            {"name": "predict_proba", "dtype": "float64", "shape": [3], "labels": labels},
        ],
        "max_batch_size": 1024,
    }


def test_a_classifier_answers_rows_as_the_estimator_itself(saved: Saved) -> None:
    estimator = estimators.classifier()
    model = SklearnModel(saved(estimator), trust=True)
    first, second = model([{"X": FLOWERS[:2]}, {"X": FLOWERS[70:73]}])
    assert first["predict"].tolist() == [[one] for one in estimator.predict(FLOWERS[:2])]
    assert np.array_equal(second["predict_proba"], estimator.predict_proba(FLOWERS[70:73]))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (estimators.regressor, {"predict": ("float64", [1])}),
        (lambda: PCA(2).fit(FLOWERS), {"transform": ("float64", [2])}),
        (lambda: KMeans(3).fit(FLOWERS), {"predict": ("int32", [1]), "transform": ("float64", [3])}),
        (lambda: OneHotEncoder(handle_unknown="ignore").fit([[1], [2]]), {"transform": ("float64", [2])}),
        (
            estimators.several_targets,
            {"predict": ("int64", [2])} | {f"predict_proba_{n}": ("float64", [2 + n]) for n in range(2)},
        ),
    ],
)
def test_outputs_are_what_the_methods_give(saved: Saved, made: Any, expected: Any) -> None:
    declared = SklearnModel.declare(file=saved(made()), trust=True)
    assert {one["name"]: (one["dtype"], one["shape"]) for one in declared["outputs"]} == expected


def test_each_target_has_probabilities_of_its_own(saved: Saved) -> None:
    forest = estimators.several_targets()
    model = SklearnModel(saved(forest), trust=True, methods=["predict"])
    rows = np.random.default_rng(1).normal(size=(5, 3))
    assert np.array_equal(model([{"X": rows}])[0]["predict"], forest.predict(rows))
    declared = SklearnModel.declare(file=saved(forest), trust=True, methods=["predict_proba"])
    assert [one["name"] for one in declared["outputs"]] == ["predict_proba_0", "predict_proba_1"]


def test_a_pipeline_over_texts_takes_texts(saved: Saved) -> None:
    file = saved(estimators.sentiment())
    declared = SklearnModel.declare(file=file, trust=True)
    assert declared["inputs"] == [{"name": "text", "dtype": "bytes", "shape": [1]}]
    texts = np.array([[b"a great day"], [b"awful, awful"]], dtype=object)
    (answer,) = SklearnModel(file, trust=True)([{"text": texts}])
    assert answer["predict"].tolist() == [["glad"], ["sad"]]


def test_a_pipeline_over_named_columns_takes_one_tensor_a_column(saved: Saved) -> None:
    import pandas as pd

    pipeline = estimators.rents()
    file = saved(pipeline)
    declared = SklearnModel.declare(file=file, trust=True)
    dtypes = {"town": "bytes", "area": "float64", "rooms": "int64"}
    columns = [{"name": name, "dtype": dtype, "shape": [1]} for name, dtype in dtypes.items()]
    assert declared["inputs"] == columns
    declared = SklearnModel.declare(file=file, trust=True, columns={"area": "float32"})
    assert [one["dtype"] for one in declared["inputs"]] == ["bytes", "float32", "int64"]
    table = pd.DataFrame({"town": [b"Ulm", b"Jena"], "area": [55.0, 85.0], "rooms": [2, 3]})
    (answer,) = SklearnModel(file, trust=True)([{name: table[[name]].to_numpy() for name in table}])
    expected = pipeline.predict(table.assign(town=["Ulm", "Jena"]))
    assert answer["predict"].ravel().tolist() == expected.tolist()


def test_a_row_that_the_estimator_does_not_take_fails_its_own_request(saved: Saved) -> None:
    model = SklearnModel(saved(estimators.classifier()), trust=True)
    bad = np.full((1, 4), np.nan)
    good, failed = model([{"X": FLOWERS[:1]}, {"X": bad}])
    assert good["predict"].tolist() == [["setosa"]]
    assert isinstance(failed, InvalidArgument)
    assert "NaN" in str(failed)
    with pytest.raises(InvalidArgument, match="NaN"):
        model([{"X": bad}])


class Marker:
    """Its pickle tells that it was loaded."""

    loaded = False

    def __setstate__(self, state: Any) -> None:
        Marker.loaded = True

    def __getstate__(self) -> Any:
        return {"a": 1}


def test_a_pickle_is_not_loaded_without_trust(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(Marker()))
    with pytest.raises(ModelFileError, match=r"runs whatever code is in it.*kwargs: \{trust: true\}"):
        SklearnModel(str(file))
    assert not Marker.loaded
    with pytest.raises(ModelFileError, match="neither predict nor transform"):
        SklearnModel(str(file), trust=True)
    assert Marker.loaded


def test_types_that_skops_does_not_know_are_refused_by_name(tmp_path: Path) -> None:
    file = str(tmp_path / "model.skops")
    skops.io.dump(FunctionTransformer(estimators.doubled).fit(FLOWERS), file)
    unknown = skops.io.get_untrusted_types(file=file)
    with pytest.raises(ModelFileError, match=r"kwargs: \{trusted: \[estimators\.doubled\]\}"):
        SklearnModel(file)
    answer = SklearnModel(file, trusted=unknown)([{"X": FLOWERS[:1]}])[0]
    assert unknown == ["estimators.doubled"]
    assert np.array_equal(answer["transform"], 2 * FLOWERS[:1])


@pytest.mark.parametrize(
    ("name", "content", "kwargs", "said"),
    [
        ("gone.skops", None, {}, "there is no file"),
        ("broken.skops", b"PK\x03\x04 no archive", {}, "'broken.skops' cannot be read"),
        ("broken.pkl", b"no pickle", {"trust": True}, "'broken.pkl' cannot be read"),
        ("model.h5", b"", {}, "expected one that ends in .skops, .joblib, .pkl, .pickle"),
        ("model.pkl", pickle.dumps(DBSCAN()), {"trust": True}, "DBSCAN, which has neither"),
    ],
)
def test_other_files_are_refused_in_a_sentence(
    tmp_path: Path, name: str, content: bytes | None, kwargs: Any, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError) as refused:
        SklearnModel.declare(file=str(tmp_path / name), **kwargs)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("made", "kwargs", "said"),
    [
        (
            estimators.classifier,
            {"methods": ["transform"]},
            "has no method 'transform' to serve; it has predict, predict_proba",
        ),
        (estimators.classifier, {"columns": True}, "fitted without names of columns"),
        (estimators.classifier, {"dtype": "text"}, "'text' is no dtype of an input"),
        (estimators.classifier, {"device": "cuda:0"}, "computes on the CPU; the instance has device: cuda:0"),
        (
            estimators.rents,
            {"columns": {"are": "float32"}},
            "no column 'are'; it was fitted with 'town', 'area', 'rooms'",
        ),
    ],
)
def test_what_the_estimator_does_not_have_is_refused(saved: Saved, made: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        SklearnModel(saved(made()), trust=True, **kwargs)


def test_a_library_that_is_missing_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.skops"
    file.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "skops.io", None)
    monkeypatch.setitem(sys.modules, "skops", None)
    with pytest.raises(ModelFileError, match=r"'skops' is not installed; pip install 'gpuserve\[sklearn\]'"):
        SklearnModel(str(file))
