"""Models of scikit-learn behind a server: one for all tests of this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import estimators
import numpy as np
import pytest
from config_file import write_config
from serving import GPUSERVE, Addresses, serving
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

ONE = np.array([[5.1, 3.5, 1.4, 0.2]])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    import joblib  # with its company it takes seconds, which whoever only collects this file need not wait
    import skops.io

    folder = tmp_path_factory.mktemp("sklearn")
    skops.io.dump(estimators.classifier(), folder / "iris.skops")
    joblib.dump(estimators.rents(), folder / "rents.joblib")
    config = write_config(
        folder,
        [
            {
                "name": "iris",
                "callable": "iris.skops",
                "kwargs": {"shared_weights": True},
            },
            {"name": "rents", "callable": "rents.joblib", "kwargs": {"trust": True}},
        ],
        host="127.0.0.1",
    )
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.http) as connection:
        yield connection


def given(**arrays: Any) -> list[InferInput]:
    tensors = []
    for name, array in arrays.items():
        kinds = {"f": "FP64", "i": "INT64", "O": "BYTES"}
        tensors.append(InferInput(name, list(array.shape), kinds[array.dtype.kind]))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def test_a_classifier_answers_with_words_and_probabilities(client: InferenceServerClient) -> None:
    estimator, flowers = estimators.classifier(), estimators.flowers()[::30]
    answer = client.infer("iris", given(X=flowers))
    assert [one.decode() for one in answer.as_numpy("predict")[:, 0]] == list(estimator.predict(flowers))
    assert np.allclose(answer.as_numpy("predict_proba"), estimator.predict_proba(flowers), atol=1e-12)


def test_only_the_outputs_that_are_asked_for_come(client: InferenceServerClient) -> None:
    answer = client.infer("iris", given(X=ONE), outputs=[InferRequestedOutput("predict")])
    assert [one["name"] for one in answer.get_response()["outputs"]] == ["predict"]


def test_the_likeliest_classes_come_by_name(client: InferenceServerClient) -> None:
    best = InferRequestedOutput("predict_proba", class_count=1)
    ((found,),) = client.infer("iris", given(X=ONE), outputs=[best]).as_numpy("predict_proba")
    assert found.decode().endswith(":0:setosa")


def test_a_pipeline_takes_a_tensor_for_each_column(client: InferenceServerClient) -> None:
    town = np.array([[b"Bonn"], [b"Ulm"]], dtype=object)
    answer = client.infer(
        "rents", given(town=town, area=np.array([[50.0], [80.0]]), rooms=np.array([[2], [3]]))
    )
    assert np.allclose(answer.as_numpy("predict")[:, 0], [700, 900], atol=60)


def test_what_the_estimator_does_not_take_is_the_mistake_of_the_client(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="contains NaN") as refused:
        client.infer("iris", given(X=np.full((1, 4), np.nan)))
    assert refused.value.status() == "400"
    town = np.array([[b"Atlantis"]], dtype=object)
    with pytest.raises(InferenceServerException, match="Atlantis") as refused:
        client.infer("rents", given(town=town, area=np.array([[50.0]]), rooms=np.array([[2]])))
    assert refused.value.status() == "400"
