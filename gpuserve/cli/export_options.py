"""The options that exports of pods have in common, and ``ExportOptions`` made of what was given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from gpuserve.export.options import ExportOptions

#: Options whose value is an amount of memory: the field of ``ExportOptions`` by the name of the parameter.
_AMOUNTS = {"node_memory": "node_memory_nbytes", "gpu_memory": "gpu_memory_nbytes"}
_OPTIONS: dict[str, Any] = {
    "image": Annotated[str, typer.Option(metavar="IMAGE", help="Image of the pods, with a tag or a digest.")],
    "name": Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name of all objects; default that of the only model, or gpuserve."
        ),
    ],
    "namespace": Annotated[
        str, typer.Option(metavar="NAME", help="Default: the one in which they are applied.")
    ],
    "replicas": Annotated[int, typer.Option(min=1, help="Pods at least.")],
    "max_replicas": Annotated[
        int | None, typer.Option(min=1, help="Pods at most; default four times as many.")
    ],
    "gpus_per_node": Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of a node, or MIG slices; needed where the config has cuda:*."),
    ],
    "gpu_resource": Annotated[
        str,
        typer.Option(metavar="RESOURCE", help="What the device plugin calls them: nvidia.com/mig-1g.10gb."),
    ],
    "node_cpus": Annotated[
        int | None, typer.Option(min=1, help="Cores of a node that pods may have; checked.")
    ],
    "node_memory": Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="Memory of a node that pods may have, such as 64Gi; checked."),
    ],
    "gpu_memory": Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="Memory of a GPU; checked where gpu_memory_nbytes is given."),
    ],
    "tls_secret": Annotated[
        str, typer.Option(metavar="NAME", help="Secret with tls.crt and tls.key, for pods that speak TLS.")
    ],
    "prometheus": Annotated[str, typer.Option(metavar="URL", help="Prometheus, for KEDA.")],
}


def with_pod_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb that ends in ``**flags: Any`` an option for each of them, before its last parameter."""
    signature = inspect.signature(verb, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    defaults = {one.name: one.default for one in fields(ExportOptions)}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=annotation,
        )
        for name, annotation in _OPTIONS.items()
    ]
    verb.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    verb.__annotations__ = {one.name: one.annotation for one in (*own, *options)}
    return verb


def export_options(flags: dict[str, Any]) -> ExportOptions:
    """What was given, with amounts of memory as bytes.

    Raises:
        BadParameter: an amount is none.
    """
    given: dict[str, Any] = {name: value for name, value in flags.items() if name not in _AMOUNTS}
    amounts = {field: _nbytes(name, flags[name]) for name, field in _AMOUNTS.items()}
    return ExportOptions(**given | amounts)


def _nbytes(name: str, text: str | None) -> int | None:
    from gpuserve.export.quantities import parse_nbytes

    try:
        return None if text is None else parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--" + name.replace("_", "-")) from None
