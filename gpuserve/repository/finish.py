"""What the models of a repository have and those of a config file do not: the state of their files, so that a
reload sees new code and weights, and label files by the names that clients are told.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from gpuserve.config.load import Configuration
from gpuserve.config.messages import ConfigProblems, Problem
from gpuserve.declare.spec import ModelSpec
from gpuserve.front.v2.model_config import kept_config
from gpuserve.repository.folders import revision
from gpuserve.repository.translation import Translation


def finished(
    configuration: Configuration, translations: Sequence[Translation], broken: Mapping[str, Sequence[Problem]]
) -> Configuration:
    known = {one.folder.name: one for one in translations}
    models = tuple(_finished(one, known[one.name]) for one in configuration.models)
    return dataclasses.replace(
        configuration,
        models=models,
        broken={name: ConfigProblems(broken[name]) for name in sorted(broken)},
        described=frozenset(index for index, one in enumerate(models) if known[one.name].asks),
        remarks=tuple(_remarks(translations)),
    )


def _remarks(translations: Sequence[Translation]) -> list[str]:
    """What has no effect, once for all models that have it."""
    models: dict[str, list[str]] = {}
    for translation in translations:
        for note in translation.draft.notes:
            models.setdefault(note.text, []).append(translation.folder.name)
    return [f"{text} (model {', '.join(dict.fromkeys(names))})" for text, names in models.items()]


def _finished(spec: ModelSpec, translation: Translation) -> ModelSpec:
    folder = translation.folder
    files = {"revision": revision(os.path.join(folder.path, str(spec.version)))}
    instances = tuple(dataclasses.replace(one, source=one.source | files) for one in spec.instances)
    labels = tuple(
        dataclasses.replace(one, filename=os.path.relpath(one.filename, folder.path)) if one.filename else one
        for one in spec.labels
    )
    config = kept_config(translation.config)
    return dataclasses.replace(spec, instances=instances, labels=labels, triton_config=config)
