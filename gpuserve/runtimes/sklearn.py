"""Models of scikit-learn: an estimator or a pipeline from its file, each of its methods an output. The file
is read in ``sklearn_files``; what an estimator takes is in ``sklearn_inputs``, what it answers in
``sklearn_outputs``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import InvalidArgument
from gpuserve.decorators import batch
from gpuserve.runtimes.missing import ModelFileError
from gpuserve.runtimes.served import each_alone, served_model
from gpuserve.runtimes.sklearn_files import load_estimator
from gpuserve.runtimes.sklearn_inputs import Columns, form_of
from gpuserve.runtimes.sklearn_outputs import Output, methods_of, output_named, results, tried
from gpuserve_worker.calling.request import Batch, accept_batch

#: A row costs little, and a request of many rows is one that has to fit.
MAX_BATCH_SIZE: Final = 1024


class SklearnModel:
    """Answers rows with what the methods of an estimator give: predict, predict_proba, transform and others.

    Args:
        file: a .skops file, or a .joblib or .pkl one.
        trust: whether a pickle may be loaded, which runs the code in it.
        trusted: names of types that a .skops file may hold beside those that skops knows.
        columns: true for one input a column; or the dtypes of columns, by name.
        methods: which methods are outputs.
        dtype: type of numbers whose type the file does not tell.
        device: the instance's device, which has to be the CPU.

    Raises:
        ModelFileError: the file cannot be served like this.
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
    ) -> None:
        if device != "cpu":
            raise ModelFileError(f"scikit-learn computes on the CPU; the instance has device: {device}")
        self._estimator = load_estimator(file, trust=trust, trusted=trusted)
        self._form = form_of(self._estimator, columns, dtype)
        model = served_model()
        declared = [] if model is None else [one.name for one in model.outputs]
        names = declared or methods_of(self._estimator, methods)
        self._outputs = [output_named(one) for one in names]
        # One array for all features is what was declared: names are not missing.
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
        """Inputs, outputs and the largest batch, as a config file has them; raises ``ModelFileError``."""
        estimator = load_estimator(file, trust=trust, trusted=trusted)
        form = form_of(estimator, columns, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zeros are no real input
            outputs = tried(estimator, form.argument(form.trial()), methods_of(estimator, methods))
        return {"inputs": form.tensors(), "outputs": outputs, "max_batch_size": MAX_BATCH_SIZE}

    def __call__(self, requests: Any) -> Any:
        """Answers all requests by one call of each method that is asked for. A request that the estimator
        does not take fails alone.
        """
        outputs = self._asked(requests)
        try:
            return self._answers(outputs, requests)
        except ValueError as error:  # scikit-learn's word for an input that it does not take
            answers = each_alone(partial(self._answers, outputs), requests, ValueError)
            if answers is None:
                raise InvalidArgument(str(error)) from error
            return [InvalidArgument(str(one)) if isinstance(one, ValueError) else one for one in answers]

    def _answers(self, outputs: Sequence[Output], requests: Any) -> Any:
        over_requests: Any = self._answer  # for type checkers it takes arrays still
        return over_requests(outputs, requests)

    @batch
    def _answer(self, outputs: Sequence[Output], /, **arrays: Any) -> Any:
        return results(self._estimator, self._form.argument(arrays), outputs)

    def _asked(self, requests: Any) -> list[Output]:
        """The outputs that some request wants: a method that nobody asks for is not called."""
        wanted: set[str] = set()
        for one in requests.requests if isinstance(requests, Batch) else ():
            if not one[2]:
                return self._outputs
            wanted.update(one[2])
        return [one for one in self._outputs if one.name in wanted] if wanted else self._outputs


accept_batch(SklearnModel.__call__)
