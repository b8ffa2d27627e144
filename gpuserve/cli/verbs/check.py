"""``gpuserve check`` and ``gpuserve schema``: what a config file may say, and what is wrong with one."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuserve.cli.console import model_options
from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.cli.console.failures import exit_code_of
from gpuserve.config.repositories import CallableFlags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuserve.config.problems import Problem
    from gpuserve.model.spec import ModelSpec
    from gpuserve_worker.protocol.tensor import TensorSpec


def check(
    config: Annotated[
        str, typer.Argument(metavar="TARGET", help="A config file, a model file, a callable or a repository.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as a JSON object.")] = False,
    name: model_options.Name = None,
    inputs: model_options.Inputs = None,
    outputs: model_options.Outputs = None,
    max_batch_size: model_options.MaxBatchSize = None,
    devices: model_options.Devices = None,
    instances: model_options.Instances = None,
) -> None:
    """Validate a config file, or what ``serve`` takes in its place, and print what would be served.

    The file and the GPUSERVE_ variables are checked first; then every callable is imported, in a
    process of its own, and every device looked for. All problems are shown at once.

    Examples:
      gpuserve check config.yaml
      gpuserve check model.onnx
      gpuserve check model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve check config.yaml --json
      gpuserve check models/
    """
    from gpuserve.cli.console.preflight import device_problems, import_problems, trace_problems
    from gpuserve.config.problems import ConfigProblems
    from gpuserve.config.triton.load import load_target
    from gpuserve.supervisor.placement import ServerDevices

    flags = CallableFlags(name, inputs or (), outputs or (), max_batch_size, devices or (), instances)
    model_options.require_callable(config, flags)
    try:
        configuration = load_target(config, os.environ, model=flags)
    except ConfigProblems as error:
        _report(as_json, config, error.problems, [])
        raise typer.Exit(exit_code_of(error) if flags.given() else ExitCode.BAD_CONFIG) from None
    wrong = [one for error in configuration.broken.values() for one in error.problems]
    wrong += [*trace_problems(configuration), *import_problems(configuration)]
    machine = ServerDevices()
    absent = device_problems(configuration, machine)
    models = configuration.models if absent else machine.place(configuration.models)
    for line in configuration.remarks:
        sys.stderr.write(f"{line}\n")
    lost = {one.model for one in wrong}
    shown = [_summary(model) for model in models if model.name not in lost]
    _report(as_json, config, [*wrong, *absent], shown, even_so=os.path.isdir(config))
    if wrong:
        raise typer.Exit(ExitCode.BAD_CONFIG)
    if absent:
        raise typer.Exit(ExitCode.NO_SUCH_DEVICE)


def _report(
    as_json: bool,
    config: str,
    problems: Sequence[Problem],
    models: list[dict[str, Any]],
    *,
    even_so: bool = False,
) -> None:
    """Write the result to stdout; problems go to stderr unless JSON was asked for. ``even_so``: the models
    are served whatever the problems are.
    """
    if as_json:
        result = {"config": config, "ok": not problems, "problems": [one.as_json() for one in problems]}
        sys.stdout.write(json.dumps(result | {"models": models}, indent=2, ensure_ascii=False) + "\n")
        return
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if problems and not even_so:
        return
    for model in models:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(model)))
    if not problems:
        sys.stdout.write(f"{config} is valid\n")


def _lines(model: dict[str, Any]) -> Iterator[str]:
    of = [f"ensemble of {', '.join(model['steps'])}"] if model["steps"] else model["instances"]
    if model["max_batch_size"]:
        of = [*of, f"batches of up to {model['max_batch_size']}"]
    version = f" {model['version']}" if model["version"] != 1 else ""
    yield f"{model['name']}{version}: {', '.join(of)}"
    for key, title in (("inputs", "in "), ("outputs", "out")):
        for one in model[key]:
            optional = ", optional" if one.get("optional") else ""
            yield f"  {title}  {one['name']}: {one['datatype']} {one['shape']}{optional}"


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    tensor = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    return tensor | ({"optional": True} if spec.optional else {})


def _summary(model: ModelSpec) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "instances": [instance.name for instance in model.instances],
        "steps": [step.model for step in model.steps],
        "max_batch_size": model.max_batch_size,
        "decoupled": model.decoupled,
        "inputs": [_tensor(one) for one in model.inputs],
        "outputs": [_tensor(one) for one in model.outputs],
    }


def schema() -> None:
    """Print the JSON Schema of config files, for editors.

    Example:
      gpuserve schema > gpuserve.schema.json

    A first line of "# yaml-language-server: $schema=gpuserve.schema.json" in a config file then gives
    completion and checks while it is written.
    """
    from gpuserve.config.schema import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
