"""From a file to a fitted estimator of scikit-learn. Loading a pickle runs the code in it, so that is done
only where the operator says so; a .skops file names the types that it would make, and only known ones are
made.
"""

from __future__ import annotations

import os
import pickle  # nosec B403
from collections.abc import Sequence
from typing import Any, Final

from gpuserve.runtimes.missing import ModelFileError, existing_file, library, require_trust

SKOPS: Final = (".skops",)
#: joblib reads plain pickles too.
PICKLES: Final = (".joblib", ".pkl", ".pickle")


def load_estimator(file: str, *, trust: bool, trusted: Sequence[str]) -> Any:
    """The estimator in a file. ``trust`` lets a pickle run its code, ``trusted`` are types for a .skops file.

    Raises:
        ModelFileError: the file is not there, not to be trusted, or holds something else.
    """
    suffix = os.path.splitext(file)[1].lower()
    existing_file(file)
    library("sklearn", "sklearn")
    if suffix in SKOPS:
        estimator = _from_skops(file, trusted)
    elif suffix in PICKLES:
        estimator = _from_pickle(file, trust)
    else:
        raise ModelFileError(
            f"{os.path.basename(file)!r} is no file of scikit-learn by its name; expected one that ends in "
            + ", ".join(SKOPS + PICKLES)
        )
    if not hasattr(estimator, "predict") and not hasattr(estimator, "transform"):
        raise ModelFileError(
            f"{os.path.basename(file)!r} holds {_a(type(estimator))}, which has neither predict nor transform"
        )
    return estimator


def _from_skops(file: str, trusted: Sequence[str]) -> Any:
    skops = library("skops.io", "sklearn")
    name = os.path.basename(file)
    try:
        unknown = sorted(set(skops.get_untrusted_types(file=file)) - set(trusted))
        if unknown:
            known = ", ".join([*trusted, *unknown])
            raise ModelFileError(
                f"{name!r} holds types that are not known to be harmless: {', '.join(unknown)}; if you trust "
                f"them, say kwargs: {{trusted: [{known}]}}"
            )
        return skops.load(file, trusted=list(trusted))
    except ModelFileError:
        raise
    except Exception as error:  # whatever a broken archive leads to
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
        return library("joblib", "sklearn").load(file)
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


def _a(cls: type) -> str:
    return f"an object of type {cls.__module__}.{cls.__qualname__}"
