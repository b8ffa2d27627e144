"""``TestClient``: one interface to models under test, in this process or in workers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from gpuserve.testing.local_models import LocalModels, Other
from gpuserve.testing.local_requests import LocalRequest, Outputs, WrongCall, local_request
from gpuserve.testing.targets import NO_OTHERS, Target, target_models
from gpuserve_worker.inference.model_calls import CallOptions

if TYPE_CHECKING:
    from gpuserve.testing.worker_models import WorkerModels

_OPTIONS: Final = frozenset(CallOptions.__annotations__)


class TestClient:
    """A client of models under test::

        with TestClient(double) as client:
            assert client.infer("double", x=[[1.0, 2.0]])["y"].tolist() == [[2.0, 4.0]]

    Args:
        target: An inference callable, or several by name; a ``Server`` with bound models; or a path that
            ``gpuserve serve`` accepts: a config file, ``model.py:name``, a model file, a repository, or one
            model's folder of a repository.
        workers: If False, load the models in this process by the worker's code, one instance each on the CPU
            without warm-up. If True, start a server with a front and workers, as declared.
        others: Answers to calls of models that the target lacks: functions from inputs to outputs by name.
            Not with ``workers``.
        kwargs: Arguments of a class or a factory.
        declared: For callables, keys of a config file's entry, such as ``inputs``, ``outputs`` and
            ``max_batch_size``. They override the callable's own declaration.

    Raises:
        ConfigError, BindError: if the target cannot be served as declared.
    """

    __test__ = False  # pytest collects classes named Test…

    def __init__(
        self,
        target: Target,
        /,
        *,
        workers: bool = False,
        others: Mapping[str, Other] = NO_OTHERS,
        kwargs: Mapping[str, Any] | None = None,
        **declared: Any,
    ) -> None:
        settings, specs = target_models(target, kwargs or {}, declared, pickled=workers)
        self.models = tuple(dict.fromkeys(one.name for one in specs))
        self._tested: LocalModels | WorkerModels
        if workers:
            from gpuserve.testing.worker_models import WorkerModels  # imports the supervisor

            if others:
                raise WrongCall(
                    "others work in this process only: expected no workers, or models in their place"
                )
            self._tested = WorkerModels(settings, specs)
        else:
            self._tested = LocalModels(specs, others)
        self._is_open = False

    def __repr__(self) -> str:
        return f"<TestClient of {', '.join(self.models)}{'' if self._is_open else ', not open'}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> None:
        """Load the models, as ``with`` does. Raise StartupError if a model cannot be loaded."""
        self._tested.open()
        self._is_open = True

    def close(self) -> None:
        """Close the models, as a stopping server does. A second call has no effect."""
        self._is_open = False
        self._tested.close()

    @property
    def addresses(self) -> dict[str, str]:
        """With ``workers``: the server's addresses by "http", "grpc" and "metrics"."""
        return getattr(self._tested, "addresses", {})

    def infer(
        self, model: str | None = None, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Outputs:
        """Return the outputs for one request by name.

        Args:
            model: Name of the model. Optional if there is only one.
            inputs: Arrays or lists by name, with the batch axis in front if the model batches.
            named: More inputs by name, and the options ``version``, ``requested_outputs``, ``parameters``,
                ``timeout_s``, ``request_id``, ``sequence_id``, ``sequence_start`` and ``sequence_end``. An
                input with the name of an option belongs into ``inputs``.

        Raises:
            ModelCallError: with the error that a client would get: ``code`` and a sentence. Its cause is the
                callable's exception, if that was raised in this process.
            WrongCall: if no client could make this request.
        """
        name, version, request = self._parse_call(model, inputs, named)
        return self._tested.infer(name, version, [request])[0]

    def infer_batch(
        self, model: str | None, inputs: Sequence[Mapping[str, Any]], /, **options: Any
    ) -> list[Outputs]:
        """Return the outputs for several requests. Raise as ``infer`` for the first failure. In this process
        the requests are one call of the callable. To workers they are sent together.
        """
        calls = [self._parse_call(model, one, options) for one in inputs]
        if not calls:
            return []
        return self._tested.infer(*calls[0][:2], [request for _, _, request in calls])

    def stream(
        self, model: str | None = None, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Iterator[Outputs]:
        """Yield the responses to one request as they come. Arguments and exceptions are those of ``infer``.
        Closing the iterator cancels the request.
        """
        return self._tested.stream(*self._parse_call(model, inputs, named))

    def _parse_call(
        self, model: str | None, inputs: Mapping[str, Any] | None, named: Mapping[str, Any]
    ) -> tuple[str, str, LocalRequest]:
        if not self._is_open:
            raise RuntimeError("the models are not loaded: use the TestClient in a with block, or open() it")
        if model is None and len(self.models) != 1:
            raise WrongCall(f"there are several models: name one of {', '.join(self.models)}")
        arrays = {name: one for name, one in named.items() if name not in _OPTIONS} | dict(inputs or {})
        options: Any = {name: one for name, one in named.items() if name in _OPTIONS}
        version = str(options.get("version", ""))
        return model or self.models[0], version, local_request(arrays, **options)
