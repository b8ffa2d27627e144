"""What an estimator of scikit-learn is given: one array, one table with named columns, or texts. Each form
says its tensors, makes the estimator's argument of their arrays, and has values to try the estimator with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.runtimes.missing import ModelFileError

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
#: Whether each column is a tensor, or the dtypes of columns; None: where the estimator asks for names.
Columns: TypeAlias = bool | Mapping[str, str] | None


class Form(Protocol):
    def tensors(self) -> list[dict[str, Any]]:
        """The inputs as a config file has them."""

    def argument(self, arrays: Arrays) -> Any:
        """What the estimator's methods are called with."""

    def trial(self) -> dict[str, NDArray[Any]]:
        """Two rows by which the estimator shows what it answers."""


class Rows:
    """All features as one tensor, in the order in which the estimator was fitted."""

    def __init__(self, features: int, dtype: str) -> None:
        self._features = features
        self._dtype = dtype

    def tensors(self) -> list[dict[str, Any]]:
        return [{"name": "X", "dtype": self._dtype, "shape": [self._features]}]

    def argument(self, arrays: Arrays) -> Any:
        return _only(arrays)

    def trial(self) -> dict[str, NDArray[Any]]:
        return {"X": np.zeros((2, max(self._features, 1)), self._dtype)}


class Texts:
    """One text a row, for a pipeline that begins by splitting texts into words."""

    def tensors(self) -> list[dict[str, Any]]:
        return [{"name": "text", "dtype": "bytes", "shape": [1]}]

    def argument(self, arrays: Arrays) -> Any:
        return [one.decode() for one in _only(arrays).ravel()]

    def trial(self) -> dict[str, NDArray[Any]]:
        return {"text": np.array([[b""], [b""]], dtype=object)}


class Table:
    """Each column a tensor, and a data frame for the estimator. ``examples`` are values that columns may
    have, by name.
    """

    def __init__(self, dtypes: Mapping[str, str], examples: Mapping[str, Any]) -> None:
        self._dtypes = dict(dtypes)
        self._examples = examples

    def tensors(self) -> list[dict[str, Any]]:
        return [{"name": name, "dtype": dtype, "shape": [1]} for name, dtype in self._dtypes.items()]

    def argument(self, arrays: Arrays) -> Any:
        return _pandas().DataFrame({name: _column(arrays[name]) for name in self._dtypes})

    def trial(self) -> dict[str, NDArray[Any]]:
        return {name: self._tried(name, dtype) for name, dtype in self._dtypes.items()}

    def _tried(self, name: str, dtype: str) -> NDArray[Any]:
        if dtype != "bytes":
            return np.full((2, 1), self._examples.get(name, 0), dtype)
        return np.array([[str(self._examples.get(name, "")).encode()]] * 2, dtype=object)


def form_of(estimator: Any, columns: Columns, dtype: str) -> Form:
    """The form in which an estimator takes its input; ``dtype`` is that of numbers whose type nobody knows.

    Raises:
        ModelFileError: it has no named columns, or others than were named.
    """
    _numeric(dtype)
    names = [str(one) for one in getattr(estimator, "feature_names_in_", ())]
    parts = list(_parts(estimator))
    if columns is None and _starts_with_words(estimator):
        return Texts()
    if columns or (columns is None and any(_by_name(one) for one in parts)):
        return _table(names, columns, dtype, parts)
    return Rows(int(getattr(estimator, "n_features_in_", -1)), dtype)


def _table(names: Sequence[str], columns: Columns, dtype: str, parts: Sequence[Any]) -> Table:
    given = columns if isinstance(columns, Mapping) else {}
    if not names and not given:
        raise ModelFileError(
            "the estimator was fitted without names of columns; say kwargs: {columns: {NAME: DTYPE, …}} with "
            "all of them in order, or leave columns out"
        )
    unknown = [one for one in given if names and one not in names]
    if unknown:
        raise ModelFileError(
            f"the estimator has no column {unknown[0]!r}; it was fitted with {', '.join(map(repr, names))}"
        )
    values = {name: categories for part in parts for name, categories in _categories(part)}
    guessed = {name: _dtype_of(values[name], dtype) if name in values else dtype for name in names}
    words = {name: "bytes" for part in parts for name in _word_columns(part)}
    dtypes = {**guessed, **words, **given}
    for one in dtypes.values():
        _numeric(one, bytes_too=True)
    _pandas()
    return Table(dtypes, {name: one[0] for name, one in values.items() if len(one)})


def _numeric(dtype: str, *, bytes_too: bool = False) -> None:
    try:
        known = (bytes_too and dtype == "bytes") or np.dtype(dtype).kind in "biuf"
    except TypeError:
        known = False
    if not known:
        expected = "a numpy name as float64" + (", or bytes for texts" if bytes_too else "")
        raise ModelFileError(f"{dtype!r} is no dtype of an input; expected {expected}")


def _parts(estimator: Any) -> Iterator[Any]:
    """The estimator and those within it, as they were fitted."""
    yield estimator
    inner = [step for _, step in getattr(estimator, "steps", ())]
    inner += [one[1] for one in getattr(estimator, "transformers_", ())]
    inner += [
        getattr(estimator, name) for name in ("best_estimator_", "estimator_") if hasattr(estimator, name)
    ]
    for one in inner:
        if not isinstance(one, str) and one is not None:
            yield from _parts(one)


def _by_name(part: Any) -> bool:
    """Whether columns are chosen by their names, which an array does not have."""
    return any(_named(columns) for _, _, columns in getattr(part, "transformers_", ()))


def _named(columns: Any) -> list[str]:
    if isinstance(columns, str):
        return [columns]
    if isinstance(columns, (list, tuple, np.ndarray)):
        return [str(one) for one in columns if isinstance(one, str)]
    return []


def _categories(part: Any) -> Iterator[tuple[str, Any]]:
    """The columns of which an encoder has learned all values, and those values."""
    for _, inner, columns in getattr(part, "transformers_", ()):
        names = _named(columns)
        for step in _parts(inner) if not isinstance(inner, str) else ():
            known = getattr(step, "categories_", ())
            if len(known) == len(names):
                yield from zip(names, known, strict=True)
                break


def _word_columns(part: Any) -> Iterator[str]:
    for _, inner, columns in getattr(part, "transformers_", ()):
        if isinstance(columns, str) and _starts_with_words(inner):
            yield columns


def _dtype_of(values: NDArray[Any], dtype: str) -> str:
    kind = np.asarray(values).dtype.kind
    return np.asarray(values).dtype.name if kind in "biuf" else "bytes" if kind in "OUS" else dtype


def _starts_with_words(estimator: Any) -> bool:
    while getattr(estimator, "steps", None):
        estimator = estimator.steps[0][1]
    return hasattr(estimator, "build_analyzer")  # as all that split texts have


def _only(arrays: Arrays) -> NDArray[Any]:
    (array,) = arrays.values()
    return array


def _column(array: NDArray[Any]) -> Any:
    flat = array.reshape(-1)
    return [one.decode() for one in flat] if flat.dtype == object else flat


def _pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModelFileError(
            "the estimator takes columns by name, as a data frame, and pandas is not installed; "
            "pip install pandas brings it"
        ) from None
    return pd
