"""What an estimator of scikit-learn answers: which of its methods, each as one tensor or several. The types
and shapes are found by trying the methods on two rows, since no attribute tells them for every estimator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuserve.runtimes.missing import ModelFileError

#: Methods that can be outputs, in the order in which they are declared.
METHODS: Final = (
    "predict",
    "predict_proba",
    "decision_function",
    "transform",
    "score_samples",
    "predict_log_proba",
)
#: Methods that answer with a column for each class.
_OF_CLASSES: Final = frozenset({"predict_proba", "predict_log_proba", "decision_function"})


class Output(NamedTuple):
    """A tensor that a method gives: the only one, or that of one ``target`` of a model with several."""

    name: str
    method: str
    target: int | None


def methods_of(estimator: Any, chosen: Sequence[str] | None) -> list[str]:
    """The methods whose results are outputs.

    Raises:
        ModelFileError: a chosen one is not there.
    """
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


def output_named(name: str) -> Output:
    """The output that has this name.

    Raises:
        ModelFileError: none has.
    """
    if name in METHODS:
        return Output(name, name, None)
    method, _, target = name.rpartition("_")
    if method in METHODS and target.isdecimal():
        return Output(name, method, int(target))
    raise ModelFileError(
        f"an output of scikit-learn is named by its method, one of {', '.join(METHODS)}, but {name!r} was "
        "declared"
    )


def results(estimator: Any, argument: Any, outputs: Iterable[Output]) -> dict[str, NDArray[Any]]:
    """The arrays of these outputs; each method is called once."""
    outputs = list(outputs)
    raw = {method: getattr(estimator, method)(argument) for method in {one.method for one in outputs}}
    return {one.name: _array(raw[one.method], one.target) for one in outputs}


def tried(estimator: Any, argument: Any, methods: Sequence[str]) -> list[dict[str, Any]]:
    """The outputs as a config file has them, by what the methods give for two rows.

    Raises:
        ModelFileError: the estimator cannot be called with these rows.
    """
    found: dict[str, NDArray[Any]] = {}
    for method in methods:
        try:
            result = getattr(estimator, method)(argument)
        except Exception as error:  # estimators of others may raise anything
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelFileError(
                f"what {method} gives was to be found by trying it on two rows, but it raised "
                f"{type(error).__name__}: {first}; declare inputs and outputs in a config file"
            ) from error
        targets: list[int | None] = list(range(len(result))) if isinstance(result, list) else [None]
        found |= {_name(method, one): _array(result, one) for one in targets}
    return [_declared(name, array, _labels(estimator, name)) for name, array in found.items()]


def _name(method: str, target: int | None) -> str:
    return method if target is None else f"{method}_{target}"


def _array(result: Any, target: int | None) -> NDArray[Any]:
    """One output with a batch axis and at least one more."""
    value = result if target is None else result[target]
    array = np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    return array.reshape(-1, 1) if array.ndim == 1 else array


def _declared(name: str, array: NDArray[Any], labels: list[str]) -> dict[str, Any]:
    dtype = array.dtype.name if array.dtype.kind in "biuf" else "bytes"
    entry: dict[str, Any] = {"name": name, "dtype": dtype, "shape": list(array.shape[1:])}
    return entry | {"labels": labels} if array.shape[1:] == (len(labels),) else entry


def _labels(estimator: Any, name: str) -> list[str]:
    """The classes that the columns of an output are for; none where they are for something else."""
    output = output_named(name)
    classes = getattr(estimator, "classes_", None)
    if output.method not in _OF_CLASSES or classes is None:
        return []
    return [str(one) for one in (classes if output.target is None else classes[output.target])]
