"""Stepped callables: the methods that a worker calls, and what these methods return or raise.

A stepped callable serves several requests at once and takes new ones between its steps::

    class Counter:
        max_active = 64

        def admit(self, request: Request) -> Count: ...
        def step(self, active: Sequence[Count]) -> Sequence[StepResult[Response]]: ...
        def release(self, state: Count) -> None: ...
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

State = TypeVar("State")
Response = TypeVar("Response")

#: The active requests of one instance, unless the callable or the model says another number.
DEFAULT_MAX_ACTIVE: Final = 64


class Last(Generic[Response]):
    """The result of a step that ends a request: with its last response, a list of its last responses, or
    without one.
    """

    __slots__ = ("response",)

    def __init__(self, response: Response | None = None) -> None:
        self.response = response

    def __repr__(self) -> str:
        return f"Last({self.response!r})"


class Later(Exception):
    """Raised by ``admit`` for a request that has no room yet.

    The request returns to the head of the model's queue. The instance admits no request before an active one
    has ended.
    """


#: The result of a step for one request: nothing yet (None), a response, a list of responses, ``Last``, or an
#: error that ends the request. A response is a mapping of output names to arrays, a tuple of arrays in the
#: order of the outputs, or the array of the only output. With ``openai: true`` it is a text, a ``Token``, …
StepResult: TypeAlias = Response | list[Response] | Last[Response] | Last[list[Response]] | Exception | None


class SteppedCallable(Protocol[State]):
    """A callable that is stepped. Both methods may be coroutines.

    Attributes that are optional: ``max_active``, the largest number of active requests of an instance
    (default 64), and a method ``release(state)``, which is called exactly once for each admitted request,
    whatever ended it: its last response, an error, a cancellation, or the end of the worker.
    """

    @property
    def admit(self) -> Callable[..., State | Awaitable[State]]:
        """The method that returns the state of a new request.

        Its argument is a ``gpuserve.Request``; below ``@sample``, the inputs and parameters by name. A model
        with ``openai: true`` gets a ``ChatRequest`` or a ``CompletionRequest``. ``Later`` says that the
        request has no room yet; any other exception fails the request.
        """

    def step(self, active: Sequence[State]) -> Sequence[Any] | Awaitable[Sequence[Any]]:
        """Return one ``StepResult`` for each state, in order.

        Args:
            active: The states of the active requests, in the order of their admission. Requests whose clients
                read too slowly are left out until the clients have caught up.

        Raises:
            Exception: The requests that have sent a response fail. Each of the others runs once more, alone.
        """


#: A callable that a server can serve.
Served: TypeAlias = Callable[..., Any] | SteppedCallable[Any]


def is_stepped(made: Any) -> bool:
    """Return whether a callable, or the instances of a class, are stepped."""
    return callable(getattr(made, "admit", None)) and callable(getattr(made, "step", None))


def max_active_of(made: Any) -> int:
    """Return the number of active requests that a stepped callable asks for."""
    given = getattr(made, "max_active", None)
    return given if isinstance(given, int) and given > 0 else DEFAULT_MAX_ACTIVE
