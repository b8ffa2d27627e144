"""Inputs of scikit-learn estimators: one array, one table with named columns, or texts.

Each form declares its tensors, converts their arrays to the estimator's argument, and has trial rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.backends.model_files import ModelFileError

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
#: Whether each column is a tensor, or the dtypes of columns. None: if the estimator selects columns by name.
Columns: TypeAlias = bool | Mapping[str, str] | None


class InputForm(Protocol):
    """A form of input."""

    def tensors(self) -> list[dict[str, Any]]:
        """Return the inputs as a config file has them."""

    def argument(self, arrays: Arrays) -> Any:
        """Return the argument of the estimator's methods."""

    def trial(self) -> dict[str, NDArray[Any]]:
        """Return two rows to call the estimator with on trial."""


class ArrayInput:
    """All features as one tensor, in the order in which the estimator was fitted."""

    def __init__(self, features: int, dtype: str) -> None:
        self._features = features
        self._dtype = dtype

    def tensors(self) -> list[dict[str, Any]]:
        return [{"name": "X", "dtype": self._dtype, "shape": [self._features]}]

    def argument(self, arrays: Arrays) -> Any:
        return _single_array(arrays)

    def trial(self) -> dict[str, NDArray[Any]]:
        return {"X": np.zeros((2, max(self._features, 1)), self._dtype)}


class TextInput:
    """One text for each row, for a pipeline that starts by splitting texts into words."""

    def tensors(self) -> list[dict[str, Any]]:
        return [{"name": "text", "dtype": "bytes", "shape": [1]}]

    def argument(self, arrays: Arrays) -> Any:
        return [one.decode() for one in _single_array(arrays).ravel()]

    def trial(self) -> dict[str, NDArray[Any]]:
        return {"text": np.array([[b""], [b""]], dtype=object)}


class TableInput:
    """A tensor for each column, and a data frame for the estimator. ``examples`` are column values."""

    def __init__(self, dtypes: Mapping[str, str], examples: Mapping[str, Any]) -> None:
        self._dtypes = dict(dtypes)
        self._examples = examples

    def tensors(self) -> list[dict[str, Any]]:
        return [{"name": name, "dtype": dtype, "shape": [1]} for name, dtype in self._dtypes.items()]

    def argument(self, arrays: Arrays) -> Any:
        return _import_pandas().DataFrame({name: _flat_column(arrays[name]) for name in self._dtypes})

    def trial(self) -> dict[str, NDArray[Any]]:
        return {name: self._trial_column(name, dtype) for name, dtype in self._dtypes.items()}

    def _trial_column(self, name: str, dtype: str) -> NDArray[Any]:
        if dtype != "bytes":
            return np.full((2, 1), self._examples.get(name, 0), dtype)
        return np.array([[str(self._examples.get(name, "")).encode()]] * 2, dtype=object)


def input_form(estimator: Any, columns: Columns, dtype: str) -> InputForm:
    """Return the form of input of an estimator. ``dtype`` is the type of numbers whose type is unknown. Raise
    ModelFileError if the estimator has no named columns, or other columns than ``columns`` names.
    """
    _check_dtype(dtype)
    names = [str(one) for one in getattr(estimator, "feature_names_in_", ())]
    parts = list(_nested_estimators(estimator))
    if columns is None and _takes_texts(estimator):
        return TextInput()
    if columns or (columns is None and any(_selects_by_name(one) for one in parts)):
        return _table_input(names, columns, dtype, parts)
    return ArrayInput(int(getattr(estimator, "n_features_in_", -1)), dtype)


def _table_input(names: Sequence[str], columns: Columns, dtype: str, parts: Sequence[Any]) -> TableInput:
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
    guessed = {name: _dtype_of_values(values[name], dtype) if name in values else dtype for name in names}
    words = {name: "bytes" for part in parts for name in _text_columns(part)}
    dtypes = {**guessed, **words, **given}
    for one in dtypes.values():
        _check_dtype(one, bytes_too=True)
    _import_pandas()
    return TableInput(dtypes, {name: one[0] for name, one in values.items() if len(one)})


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


def _selects_by_name(part: Any) -> bool:
    """Return whether the estimator selects columns by name, which an array does not have."""
    return any(_column_names(columns) for _, _, columns in getattr(part, "transformers_", ()))


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


def _text_columns(part: Any) -> Iterator[str]:
    for _, inner, columns in getattr(part, "transformers_", ()):
        if isinstance(columns, str) and _takes_texts(inner):
            yield columns


def _dtype_of_values(values: NDArray[Any], dtype: str) -> str:
    kind = np.asarray(values).dtype.kind
    return np.asarray(values).dtype.name if kind in "biuf" else "bytes" if kind in "OUS" else dtype


def _takes_texts(estimator: Any) -> bool:
    while getattr(estimator, "steps", None):
        estimator = estimator.steps[0][1]
    return hasattr(estimator, "build_analyzer")  # every vectorizer of texts has this method


def _single_array(arrays: Arrays) -> NDArray[Any]:
    (array,) = arrays.values()
    return array


def _flat_column(array: NDArray[Any]) -> Any:
    flat = array.reshape(-1)
    return [one.decode() for one in flat] if flat.dtype == object else flat


def _import_pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModelFileError(
            "the estimator takes columns by name, as a data frame, and pandas is not installed; "
            "pip install pandas installs it"
        ) from None
    return pd
