"""The labels of a config file: what they come to, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpuserve.config.model_entry import ModelEntry, OutputEntry
from gpuserve.config.plain import Violation
from gpuserve.config.positions import Path
from gpuserve.label_spec import LabelSpec, labels_in


def label_specs(entry: ModelEntry, base_dir: str) -> tuple[LabelSpec, ...]:
    """The labels of a model without violations."""
    return tuple(
        LabelSpec(one.name, _labels(one, base_dir), one.label_filename or "")
        for one in entry.outputs
        if one.labels or one.label_filename is not None
    )


def violations(entry: ModelEntry, base_dir: str, path: Path) -> Iterator[Violation]:
    """Every output whose labels are given twice, or whose file cannot be read."""
    for index, one in enumerate(entry.outputs):
        where = (*path, "outputs", index)
        if one.labels and one.label_filename is not None:
            yield Violation(where, f"output {one.name!r} has labels and label_filename, expected one of them")
            continue
        try:
            _labels(one, base_dir)
        except OSError as error:
            text = f"output {one.name!r}: the file cannot be read: {error.strerror}"
            yield Violation((*where, "label_filename"), text)
        except UnicodeDecodeError:
            yield Violation((*where, "label_filename"), f"output {one.name!r}: the file is no UTF-8")
        except ValueError as error:
            yield Violation((*where, "label_filename"), f"output {one.name!r}: {error}")


def _labels(output: OutputEntry, base_dir: str) -> tuple[str, ...]:
    """The labels themselves.

    Raises:
        OSError: there is no such file.
        ValueError: it is no UTF-8, or too long.
    """
    if output.label_filename is None:
        return tuple(output.labels)
    with open(os.path.join(base_dir, output.label_filename), encoding="utf-8") as file:
        return labels_in(file.read())
