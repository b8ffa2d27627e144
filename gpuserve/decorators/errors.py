"""What the decorators raise while requests are served. Nothing is raised from here.

::

    DecoratorError
    ├── BatchError      (ValueError)    requests, inputs or outputs that do not fit together
    ├── ValuesError     (ValueError)    rows that had to be equal, or to be made equal, and cannot
    ├── DefaultsError   (ValueError)    defaults of @fill_optionals that do not fit the model
    ├── StackError      (RuntimeError)  a decorator in a place of the stack where it cannot work
    └── NoModelError    (LookupError)   a decorator that asks for the model, called outside a server

What is wrong with the use of a decorator itself, and can be seen at once, is a ``TypeError``.
"""

from __future__ import annotations


class DecoratorError(Exception):
    """The base of every error that a decorator raises."""


class BatchError(DecoratorError, ValueError):
    """The requests, the inputs or the outputs of a batch do not fit together."""


class ValuesError(DecoratorError, ValueError):
    """Rows are not equal where they must be, or cannot be padded to each other."""


class DefaultsError(DecoratorError, ValueError):
    """A default of ``fill_optionals`` does not fit the model."""


class StackError(DecoratorError, RuntimeError):
    """A decorator is above or below another one that it has to be on the other side of."""


class NoModelError(DecoratorError, LookupError):
    """A decorator needs to know the model, but the callable was not called by a server."""
