"""``gpuserve scale``: more or fewer instances of models of a running server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpuserve.cli.operator_call import AsJson, Server, ask, document, end, show_json, show_text

#: One or more; no number of instances has ten digits.
_COUNT: Final = re.compile("[1-9][0-9]{0,8}")

if TYPE_CHECKING:
    from gpuserve.supervisor.operator.outcome import Outcome


def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="MODEL=N...", help="Instances of a model on each of its devices.")
    ],
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Change how many instances models of a running server have, while they serve.

    The config file is not changed.

    Examples:
      gpuserve scale linear=4
      gpuserve scale linear=4 other=2
    """
    outcome = ask(server, "scale", {"counts": dict(_counts(counts))}, as_json)
    if as_json:
        show_json(document(outcome))
    else:
        _show(outcome)
    end([outcome])


def _counts(texts: Iterable[str]) -> Iterable[tuple[str, int]]:
    found: dict[str, int] = {}
    for text in texts:
        model, _, count = text.rpartition("=")
        if not model or not _COUNT.fullmatch(count):
            raise typer.BadParameter(
                f"expected MODEL=N with N of 1 or more, such as linear=4, given {text!r}",
                param_hint="MODEL=N",
            )
        if model in found:
            raise typer.BadParameter(f"model {model!r} is named twice", param_hint="MODEL=N")
        found[model] = int(count)
    return found.items()


def _show(outcome: Outcome) -> None:
    for model, counts in outcome.result.get("models", {}).items():
        sys.stdout.write(f"{model}: {counts['before']} -> {counts.get('after', counts['before'])}\n")
    show_text(outcome)
