"""``TestClient``: models under test behind one face, in this process or in workers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

from gpuserve.testing.answers import Outputs
from gpuserve.testing.local_models import LocalModels
from gpuserve.testing.opening import Target, models_of
from gpuserve.testing.others import Other
from gpuserve.testing.requests import LocalRequest, WrongCall, local_request
from gpuserve_worker.calling.questions import CallOptions

_NO_OTHERS: Final[Mapping[str, Other]] = {}
_OPTIONS: Final = frozenset(CallOptions.__annotations__)


class Models(Protocol):
    """Where the models of a client run: in this process, or in workers."""

    def open(self) -> None:
        """Load every model, or raise what one of them raises."""

    def close(self) -> None:
        """End every model, and whatever runs for it."""

    def infer(self, model: str, version: str, requests: Sequence[LocalRequest]) -> list[Outputs]:
        """Answer requests that come at once."""

    def stream(self, model: str, version: str, request: LocalRequest) -> Iterator[Outputs]:
        """Answer one request by any number of responses."""


class TestClient:
    """A client of models that are under test::

        with TestClient(double) as client:
            assert client.infer("double", x=[[1.0, 2.0]])["y"].tolist() == [[2.0, 4.0]]

    Args:
        target: an inference callable, or several by name; a ``Server`` to which models are bound; or the
            path of what ``gpuserve serve`` takes: a config file, ``model.py:name``, a model file, a
            repository, and of a repository one model's folder.
        workers: False loads the models in this process, by the worker's code, with one instance on the
            CPU and no warm-up; True starts a server with a front and workers, as they were declared.
        others: what answers in the place of models that the target lacks, where they are asked by those
            that it has: functions from inputs to outputs by name. Not with ``workers``.
        kwargs: what a class or a factory is made with.
        declared: of callables: keys of a config file's entry, such as ``inputs``, ``outputs`` and
            ``max_batch_size``, before what they say of themselves.

    Raises:
        ConfigError, BindError: the target cannot be served as it is declared.
    """

    __test__ = False  # for pytest, which collects what is called Test…

    def __init__(
        self,
        target: Target,
        /,
        *,
        workers: bool = False,
        others: Mapping[str, Other] = _NO_OTHERS,
        kwargs: Mapping[str, Any] | None = None,
        **declared: Any,
    ) -> None:
        settings, specs = models_of(target, kwargs or {}, declared, pickled=workers)
        #: The names of the models.
        self.models = tuple(dict.fromkeys(one.name for one in specs))
        self._place: Models = _served(settings, specs, others) if workers else LocalModels(specs, others)
        self._is_open = False

    def __repr__(self) -> str:
        return f"<TestClient of {', '.join(self.models)}{'' if self._is_open else ', not open'}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Load the models, as ``with`` does. Raises StartupError: one cannot be loaded."""
        self._place.open()
        self._is_open = True

    def close(self) -> None:
        """End the models, as they are when a server stops. Does nothing a second time."""
        self._is_open = False
        self._place.close()

    @property
    def addresses(self) -> dict[str, str]:
        """With ``workers``: where any client reaches them, by "http", "grpc" and "metrics"."""
        return getattr(self._place, "addresses", {})

    def infer(
        self, model: str | None = None, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Outputs:
        """The outputs for one request, by name; ``model`` may be left out where there is one.

        Inputs are arrays or lists, by name or in a mapping, with the batch axis in front where the model
        batches. Other keywords are ``version``, ``requested_outputs``, ``parameters``, ``timeout_s``,
        ``request_id``, ``sequence_id``, ``sequence_start`` and ``sequence_end``; an input of such a name
        goes into the mapping.

        Raises:
            ModelCallError: what a client would be told: ``code``, and a sentence. Its cause is what the
                callable raised, where that was in this process.
            WrongCall: no client could ask for this.
        """
        name, version, request = self._said(model, inputs, named)
        return self._place.infer(name, version, [request])[0]

    def infer_batch(
        self, model: str | None, inputs: Sequence[Mapping[str, Any]], /, **options: Any
    ) -> list[Outputs]:
        """The outputs for several requests: in this process those of one call of the callable, in workers
        those of requests that are sent at once. Raises as ``infer``, for the first that fails.
        """
        said = [self._said(model, one, options) for one in inputs]
        if not said:
            return []
        return self._place.infer(*said[0][:2], [request for _, _, request in said])

    def stream(
        self, model: str | None = None, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Iterator[Outputs]:
        """The responses to one request, as they come; closing the iterator takes the request back. The
        arguments are those of ``infer``, and so is what it raises.
        """
        return self._place.stream(*self._said(model, inputs, named))

    def _said(
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


def _served(settings: Any, specs: Any, others: Mapping[str, Other]) -> Models:
    from gpuserve.testing.served_models import WorkerModels  # brings the supervisor

    if others:
        raise WrongCall("others answer in this process alone: expected no workers, or models in their place")
    return WorkerModels(settings, specs)
