"""scikit-learn models: an estimator or a pipeline from a file. Each method of the estimator is an output.

Loading a pickle runs the code in it, so pickles need the operator's trust. A .skops file names the types in
it, and only known or trusted types are created.
"""

from __future__ import annotations

import os
import pickle  # nosec B403
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.backends.model_files import (
    ModelFileError,
    existing_file,
    import_library,
    load_once,
    require_trust,
    retry_one_by_one,
)
from gpuserve.core.errors import InvalidArgument
from gpuserve.decorators import batch
from gpuserve.decorators.wrapping import served_model
from gpuserve_worker.inference.inference_request import Batch, accept_batch

#: Rows are cheap, and a request with many rows must fit into a batch.
MAX_BATCH_SIZE: Final = 1024


class SklearnModel:
    """A callable that answers rows with the results of an estimator's methods: predict,
    predict_proba, transform and others.

    Args:
        file: A .skops file, or a .joblib or .pkl file.
        trust: Whether a pickle may be loaded, which runs the code in it.
        trusted: Names of types that a .skops file may contain beside those that skops knows.
        columns: True for one input for each column; or the dtypes of columns, by name.
        methods: The methods that are outputs.
        dtype: Type of numbers whose type the file does not have.
        device: The instance's device, which must be the CPU.
        shared_weights: Whether the instances have one copy of the estimator's arrays.

    Raises:
        ModelFileError: if the file cannot be served like this.
    """

    def __init__(
        self,
        file: str,
        trust: bool = False,
        trusted: Sequence[str] = (),
        columns: Columns = None,
        methods: Sequence[str] | None = None,
        dtype: str = "float64",
        device: str = "cpu",
        shared_weights: bool = False,
    ) -> None:
        if device != "cpu":
            raise ModelFileError(f"scikit-learn computes on the CPU; the instance has device: {device}")
        load = partial(load_estimator, file, trust=trust, trusted=trusted)
        options = trust, list(trusted)
        self._estimator = load_once(load, file, options, is_shared=shared_weights)
        self._form = input_form(self._estimator, columns, dtype)
        model = served_model()
        declared = [] if model is None else [one.name for one in model.outputs]
        names = declared or served_methods(self._estimator, methods)
        self._outputs = [parse_output_name(one) for one in names]
        # All features come as one array, as declared, so their names are not missing.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")

    @classmethod
    def declare(
        cls,
        file: str,
        trust: bool = False,
        trusted: Sequence[str] = (),
        columns: Columns = None,
        methods: Sequence[str] | None = None,
        dtype: str = "float64",
        **_others: Any,
    ) -> dict[str, Any]:
        """Return inputs, outputs and largest batch as a config file has them. Raise ``ModelFileError``."""
        estimator = load_estimator(file, trust=trust, trusted=trusted)
        form = input_form(estimator, columns, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trial rows are zeros
            outputs = trial_outputs(estimator, form, served_methods(estimator, methods))
        return {"inputs": form.tensors, "outputs": outputs, "max_batch_size": MAX_BATCH_SIZE}

    def __call__(self, requests: Any) -> Any:
        """Answer all requests by one call of each method. A rejected request fails alone."""
        over_requests: Any = self._answer  # its declared type still takes arrays
        answer = partial(over_requests, self._requested_outputs(requests))
        try:
            return answer(requests)
        except ValueError as error:  # scikit-learn raises this for inputs that it rejects
            answers = retry_one_by_one(answer, requests, ValueError)
            if answers is None:
                raise InvalidArgument(str(error)) from error
            return [InvalidArgument(str(one)) if isinstance(one, ValueError) else one for one in answers]

    @batch
    def _answer(self, outputs: Sequence[MethodOutput], /, **arrays: Any) -> Any:
        argument = self._form.argument(arrays)
        raw = {one: getattr(self._estimator, one)(argument) for one in {one.method for one in outputs}}
        return {one.name: _output_array(raw[one.method], one.target) for one in outputs}

    def _requested_outputs(self, requests: Any) -> list[MethodOutput]:
        """Return the outputs that some request wants, so that no other method is called."""
        wanted: set[str] = set()
        for one in requests.requests if isinstance(requests, Batch) else ():
            if not one[2]:
                return self._outputs
            wanted.update(one[2])
        return [one for one in self._outputs if one.name in wanted] if wanted else self._outputs


accept_batch(SklearnModel.__call__)


SKOPS: Final = (".skops",)
#: joblib reads plain pickles too.
PICKLES: Final = (".joblib", ".pkl", ".pickle")


def load_estimator(file: str, *, trust: bool, trusted: Sequence[str]) -> Any:
    """Return a file's estimator; raise ModelFileError if it is missing, not trusted, or something else."""
    suffix = os.path.splitext(file)[1].lower()
    existing_file(file)
    import_library("sklearn", "sklearn")
    if suffix in SKOPS:
        estimator = _from_skops(file, trusted)
    elif suffix in PICKLES:
        estimator = _from_pickle(file, trust)
    else:
        raise ModelFileError(
            f"{os.path.basename(file)!r} is no file of scikit-learn by its name; expected one that ends in "
            + ", ".join(SKOPS + PICKLES)
        )
    kind = type(estimator)
    if not hasattr(estimator, "predict") and not hasattr(estimator, "transform"):
        raise ModelFileError(
            f"{os.path.basename(file)!r} holds an object of type {kind.__module__}.{kind.__qualname__}, "
            "which has neither predict nor transform"
        )
    return estimator


def _from_skops(file: str, trusted: Sequence[str]) -> Any:
    skops = import_library("skops.io", "sklearn")
    name = os.path.basename(file)
    try:
        unknown = sorted(set(skops.get_untrusted_types(file=file)) - set(trusted))
        if unknown:
            known = ", ".join([*trusted, *unknown])
            raise ModelFileError(
                f"{name!r} holds types that are not known to be harmless: {', '.join(unknown)}; if you trust "
                f"them, set kwargs: {{trusted: [{known}]}}"
            )
        return skops.load(file, trusted=list(trusted))
    except ModelFileError:
        raise
    except Exception as error:  # a broken archive may raise anything
        raise _unreadable(name, error) from error


def _from_pickle(file: str, trust: bool) -> Any:
    name = os.path.basename(file)
    require_trust(
        file,
        trust,
        "a pickle, and loading one runs whatever code is in it",
        "save the model with skops.io.dump instead",
    )
    try:
        return import_library("joblib", "sklearn").load(file)
    except ModelFileError:
        raise
    except ModuleNotFoundError as error:
        raise ModelFileError(
            f"{name!r} needs the module {error.name!r}, which is not installed or not beside the config"
        ) from error
    except Exception as error:  # a pickle runs code, which may raise anything
        if isinstance(error, (EOFError, pickle.UnpicklingError, ValueError, KeyError, IndexError)):
            raise _unreadable(name, error) from error
        raise ModelFileError(f"loading {name!r} raised {type(error).__name__}: {error}") from error


def _unreadable(name: str, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"{name!r} cannot be read as a model of scikit-learn: {type(error).__name__}: {error}"
    )


#: Methods that can be outputs, in the order in which they are declared.
METHODS: Final = (
    "predict", "predict_proba", "decision_function", "transform", "score_samples", "predict_log_proba",
)  # fmt: skip
#: Methods whose results have a column for each class.
_OF_CLASSES: Final = frozenset({"predict_proba", "predict_log_proba", "decision_function"})


class MethodOutput(NamedTuple):
    """An output: the only result of a method, or the result for one ``target`` of a multi-output model."""

    name: str
    method: str
    target: int | None


def served_methods(estimator: Any, chosen: Sequence[str] | None) -> list[str]:
    """Return the methods that are outputs. Raise ModelFileError if the estimator lacks one."""
    there = [one for one in METHODS if hasattr(estimator, one)]
    for one in chosen or ():
        if one not in there:
            raise ModelFileError(
                f"{type(estimator).__name__} has no method {one!r} to serve; it has {', '.join(there)}"
            )
    if chosen:
        return list(chosen)
    scores = "predict_proba" if "predict_proba" in there else "decision_function"
    return [one for one in there if one in {"predict", scores, "transform"}]


def parse_output_name(name: str) -> MethodOutput:
    """Return the output of a name like predict or predict_0. Raise ModelFileError if none fits."""
    if name in METHODS:
        return MethodOutput(name, name, None)
    method, _, target = name.rpartition("_")
    if method in METHODS and target.isdecimal():
        return MethodOutput(name, method, int(target))
    raise ModelFileError(
        f"an output of scikit-learn is named by its method, one of {', '.join(METHODS)}, but {name!r} was "
        "declared"
    )


def trial_outputs(estimator: Any, form: InputForm, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return outputs as in a config file, found by calls with two rows; raise ModelFileError if they fail."""
    argument = form.argument(form.trial)
    found: dict[str, NDArray[Any]] = {}
    for method in methods:
        try:
            result = getattr(estimator, method)(argument)
        except Exception as error:  # third-party estimators may raise anything
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelFileError(
                f"the trial call of {method} with two rows raised "
                f"{type(error).__name__}: {first}; declare inputs and outputs in a config file"
            ) from error
        targets: list[int | None] = list(range(len(result))) if isinstance(result, list) else [None]
        found |= {method if one is None else f"{method}_{one}": _output_array(result, one) for one in targets}
    return [_declared_output(name, array, _labels(estimator, name)) for name, array in found.items()]


def _output_array(result: Any, target: int | None) -> NDArray[Any]:
    """Return one output with a batch axis and at least one more."""
    value = result if target is None else result[target]
    array = np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    return array.reshape(-1, 1) if array.ndim == 1 else array


def _declared_output(name: str, array: NDArray[Any], labels: list[str]) -> dict[str, Any]:
    dtype = array.dtype.name if array.dtype.kind in "biuf" else "bytes"
    entry: dict[str, Any] = {"name": name, "dtype": dtype, "shape": list(array.shape[1:])}
    return entry | {"labels": labels} if array.shape[1:] == (len(labels),) else entry


def _labels(estimator: Any, name: str) -> list[str]:
    """Return the classes that the columns of an output stand for, or [] if the columns are something else."""
    output = parse_output_name(name)
    classes = getattr(estimator, "classes_", None)
    if output.method not in _OF_CLASSES or classes is None:
        return []
    return [str(one) for one in (classes if output.target is None else classes[output.target])]


Arrays: TypeAlias = Mapping[str, NDArray[Any]]
#: Whether each column is a tensor, or the dtypes of columns. None: if the estimator selects columns by name.
Columns: TypeAlias = bool | Mapping[str, str] | None


class InputForm(NamedTuple):
    """A form of input: its ``tensors`` as a config file has them, two rows to call the estimator with on
    ``trial``, and a function that returns the ``argument`` of the estimator's methods.
    """

    tensors: list[dict[str, Any]]
    trial: Arrays
    argument: Callable[[Arrays], Any]


def input_form(estimator: Any, columns: Columns, dtype: str) -> InputForm:
    """Return the form of input of an estimator. ``dtype`` is the type of numbers whose type is unknown. Raise
    ModelFileError if the estimator has no named columns, or other columns than ``columns`` names.
    """
    _check_dtype(dtype)
    names = [str(one) for one in getattr(estimator, "feature_names_in_", ())]
    parts = list(_nested_estimators(estimator))
    if columns is None and _takes_texts(estimator):
        texts = {"text": np.array([[b""], [b""]], dtype=object)}
        return InputForm([{"name": "text", "dtype": "bytes", "shape": [1]}], texts, _decoded_texts)
    # An estimator may select columns by name, which an array does not have.
    chosen = (one for part in parts for _, _, one in getattr(part, "transformers_", ()))
    if columns or (columns is None and any(map(_column_names, chosen))):
        return _table_input(names, columns, dtype, parts)
    features = int(getattr(estimator, "n_features_in_", -1))
    zeros = {"X": np.zeros((2, max(features, 1)), dtype)}
    return InputForm([{"name": "X", "dtype": dtype, "shape": [features]}], zeros, _single_array)


def _table_input(names: Sequence[str], columns: Columns, dtype: str, parts: Sequence[Any]) -> InputForm:
    """Return a form with a tensor for each column, which the estimator receives as a data frame."""
    given = columns if isinstance(columns, Mapping) else {}
    if not names and not given:
        raise ModelFileError(
            "the estimator was fitted without names of columns; set kwargs: {columns: {NAME: DTYPE, …}} with "
            "all of them in order, or leave columns out"
        )
    unknown = [one for one in given if names and one not in names]
    if unknown:
        raise ModelFileError(
            f"the estimator has no column {unknown[0]!r}; it was fitted with {', '.join(map(repr, names))}"
        )
    values = {name: categories for part in parts for name, categories in _known_categories(part)}
    guessed = dict.fromkeys(names, dtype)
    for name in values.keys() & guessed.keys():
        learned = np.asarray(values[name]).dtype
        if learned.kind in "biufOUS":
            guessed[name] = learned.name if learned.kind in "biuf" else "bytes"
    chosen = [(inner, one) for part in parts for _, inner, one in getattr(part, "transformers_", ())]
    words = {one: "bytes" for inner, one in chosen if isinstance(one, str) and _takes_texts(inner)}
    dtypes = {**guessed, **words, **given}
    for one in dtypes.values():
        _check_dtype(one, bytes_too=True)
    examples = {name: one[0] for name, one in values.items() if len(one)}
    trial: dict[str, NDArray[Any]] = {}
    for name, one in dtypes.items():
        if one == "bytes":
            trial[name] = np.array([[str(examples.get(name, "")).encode()]] * 2, dtype=object)
        else:
            trial[name] = np.full((2, 1), examples.get(name, 0), one)
    tensors = [{"name": name, "dtype": one, "shape": [1]} for name, one in dtypes.items()]
    return InputForm(tensors, trial, partial(_data_frame, _import_pandas(), list(dtypes)))


def _check_dtype(dtype: str, *, bytes_too: bool = False) -> None:
    try:
        known = (bytes_too and dtype == "bytes") or np.dtype(dtype).kind in "biuf"
    except TypeError:
        known = False
    if not known:
        expected = "a numpy name as float64" + (", or bytes for texts" if bytes_too else "")
        raise ModelFileError(f"{dtype!r} is no dtype of an input; expected {expected}")


def _nested_estimators(estimator: Any) -> Iterator[Any]:
    """Yield a fitted estimator and all estimators inside."""
    yield estimator
    inner = [step for _, step in getattr(estimator, "steps", ())]
    inner += [one[1] for one in getattr(estimator, "transformers_", ())]
    inner += [
        getattr(estimator, name) for name in ("best_estimator_", "estimator_") if hasattr(estimator, name)
    ]
    for one in inner:
        if not isinstance(one, str) and one is not None:
            yield from _nested_estimators(one)


def _column_names(columns: Any) -> list[str]:
    if isinstance(columns, str):
        return [columns]
    if isinstance(columns, (list, tuple, np.ndarray)):
        return [str(one) for one in columns if isinstance(one, str)]
    return []


def _known_categories(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns for which an encoder has learned all values, with these values."""
    for _, inner, columns in getattr(part, "transformers_", ()):
        names = _column_names(columns)
        for step in _nested_estimators(inner) if not isinstance(inner, str) else ():
            known = getattr(step, "categories_", ())
            if len(known) == len(names):
                yield from zip(names, known, strict=True)
                break


def _takes_texts(estimator: Any) -> bool:
    while getattr(estimator, "steps", None):
        estimator = estimator.steps[0][1]
    return hasattr(estimator, "build_analyzer")  # every vectorizer of texts has this method


def _single_array(arrays: Arrays) -> NDArray[Any]:
    (array,) = arrays.values()
    return array


def _decoded_texts(arrays: Arrays) -> list[str]:
    return [one.decode() for one in _single_array(arrays).ravel()]


def _data_frame(pandas: Any, names: Sequence[str], arrays: Arrays) -> Any:
    flat = {name: arrays[name].reshape(-1) for name in names}
    texts = {
        name: [one.decode() for one in column] for name, column in flat.items() if column.dtype == object
    }
    return pandas.DataFrame(flat | texts)


def _import_pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModelFileError(
            "the estimator takes columns by name, as a data frame, and pandas is not installed; "
            "pip install pandas installs it"
        ) from None
    return pd
