"""Commands that look at a configuration or at this machine: ``gpuserve check``, ``schema``, ``config``,
``devices`` and ``doctor``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpuserve.cli.exit_codes import ExitCode, exit_code_of
from gpuserve.cli.serve_command import model_flags, require_callable, with_model_options, with_server_options
from gpuserve.cli.serve_command_line import overrides
from gpuserve.config.problems import Origin
from gpuserve.config.yaml_document import Path, parse_value

if TYPE_CHECKING:
    from gpuserve.config.effective import EffectiveValue
    from gpuserve.config.problems import Problem
    from gpuserve.model.spec import ModelSpec
    from gpuserve_worker.protocol.tensor import TensorSpec


@with_model_options
def check(
    config: Annotated[
        str, typer.Argument(metavar="TARGET", help="A config file, a model file, a callable or a repository.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as a JSON object.")] = False,
    **options: Any,
) -> None:
    """Validate a config file or another target of ``serve``, and print the models.

    The file and the GPUSERVE_ variables are checked first; then every callable is imported, each in a
    process of its own, and every device is looked up. All problems are shown at once.

    Examples:
      gpuserve check config.yaml
      gpuserve check model.onnx
      gpuserve check model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve check config.yaml --json
      gpuserve check models/
    """
    from gpuserve.cli.preflight import device_problems, import_problems
    from gpuserve.config.load import trace_problems
    from gpuserve.config.problems import ConfigProblems
    from gpuserve.config.triton.load import load_target
    from gpuserve.model.placement import ServerDevices

    flags = model_flags(options)
    require_callable(config, flags)
    try:
        configuration = load_target(config, os.environ, model=flags)
    except ConfigProblems as error:
        _write_result(as_json, config, error.problems, [])
        raise typer.Exit(exit_code_of(error) if flags.given() else ExitCode.BAD_CONFIG) from None
    wrong = [one for error in configuration.broken.values() for one in error.problems]
    wrong += [*trace_problems(configuration), *import_problems(configuration)]
    machine = ServerDevices()
    absent = device_problems(configuration, machine)
    models = configuration.models if absent else machine.place(configuration.models)
    for line in configuration.remarks:
        sys.stderr.write(f"{line}\n")
    lost = {one.model for one in wrong}
    shown = [_model_summary(model) for model in models if model.name not in lost]
    _write_result(as_json, config, [*wrong, *absent], shown, despite_problems=os.path.isdir(config))
    if wrong:
        raise typer.Exit(ExitCode.BAD_CONFIG)
    if absent:
        raise typer.Exit(ExitCode.NO_SUCH_DEVICE)


def _write_result(
    as_json: bool,
    config: str,
    problems: Sequence[Problem],
    models: list[dict[str, Any]],
    *,
    despite_problems: bool = False,
) -> None:
    """Write the result. ``despite_problems``: the models are served in spite of problems."""
    if as_json:
        result = {"config": config, "ok": not problems, "problems": [one.as_json() for one in problems]}
        sys.stdout.write(json.dumps(result | {"models": models}, indent=2, ensure_ascii=False) + "\n")
        return
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if problems and not despite_problems:
        return
    for model in models:
        sys.stdout.write("".join(f"{line}\n" for line in _model_lines(model)))
    if not problems:
        sys.stdout.write(f"{config} is valid\n")


def _model_lines(model: dict[str, Any]) -> Iterator[str]:
    of = [f"ensemble of {', '.join(model['steps'])}"] if model["steps"] else model["instances"]
    if model["max_batch_size"]:
        of = [*of, f"batches of up to {model['max_batch_size']}"]
    version = f" {model['version']}" if model["version"] != 1 else ""
    yield f"{model['name']}{version}: {', '.join(of)}"
    for key, title in (("inputs", "in "), ("outputs", "out")):
        for one in model[key]:
            flags = "".join(f", {flag}" for flag in ("optional", "ragged") if one.get(flag))
            yield f"  {title}  {one['name']}: {one['datatype']} {one['shape']}{flags}"


def _tensor_summary(spec: TensorSpec) -> dict[str, Any]:
    tensor = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    return tensor | {flag: True for flag in ("optional", "ragged") if getattr(spec, flag)}


def _model_summary(model: ModelSpec) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "instances": [instance.name for instance in model.instances],
        "steps": [step.model for step in model.steps],
        "max_batch_size": model.max_batch_size,
        "decoupled": model.decoupled,
        "inputs": [_tensor_summary(one) for one in model.inputs],
        "outputs": [_tensor_summary(one) for one in model.outputs],
    }


def schema() -> None:
    """Print the JSON Schema of config files, for editors.

    Example:
      gpuserve schema > gpuserve.schema.json

    Editors complete and check a config file whose first line is
    "# yaml-language-server: $schema=gpuserve.schema.json".
    """
    from gpuserve.config.schema import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


@with_server_options
def config(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A config file, a model file, a callable or a repository.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Leave out defaults.")] = False,
    **flags: str | bool | None,
) -> None:
    """Print the effective configuration of ``serve``, with the origin of each value.

    Precedence: flag, environment variable, file, attributes of the callable, default. Tokens are masked.
    With --brief the output is a config file with the same effect.

    Examples:
      gpuserve config config.yaml
      gpuserve config config.yaml --brief --http-port 9000
      gpuserve config models/ --json
    """
    from gpuserve.config.effective import effective
    from gpuserve.config.triton.load import load_target

    configuration = load_target(target, os.environ, overrides(flags))
    values = [one for one in effective(configuration) if one.origin is not None or not brief]
    if as_json:
        document = {"target": target, "values": [one.as_json() for one in values]}
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(effective_yaml(values))


def devices(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A config file whose models are placed on the devices."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """List the GPUs of this machine: names for a config, memory, NUMA node, MIG, driver.

    With a config file, also list the device of each instance of its models. A machine without a GPU is no
    error: the output says what was found and what is missing.

    Examples:
      gpuserve devices
      gpuserve devices config.yaml --json
    """
    from gpuserve.cli.devices_report import inventory_as_json, inventory_as_text
    from gpuserve.core.errors import DeviceError
    from gpuserve.model.placement import ServerDevices, installed_cupy

    known = ServerDevices()
    inventory, cupy = known.inventory(), installed_cupy()
    models, absent = None, None
    if config is not None:
        try:
            from gpuserve.cli.preflight import with_devices
            from gpuserve.config.load import load_file

            models = with_devices(load_file(config, os.environ), known).models
        except DeviceError as error:
            absent = error
    if as_json:
        facts = inventory_as_json(inventory, cupy, models)
        sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(inventory_as_text(inventory, cupy, models))
    if absent is not None:
        raise absent


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="A target of serve, whose ports, packages and devices are checked."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Check what a server needs of this machine, and advise on problems.

    Python, its packages, the kernel, GPUs and their driver, processors and memory of the control group,
    limits, the clock, other servers, ports; with a config file also the needs of its models. Each finding is
    ok, a warning or a fault; after a fault the exit status is 1. Nothing is changed.

    Examples:
      gpuserve doctor
      gpuserve doctor config.yaml --json
    """
    from gpuserve.cli.doctor_checks import all_findings, findings_as_text, has_fault

    found = all_findings(config)
    if as_json:
        findings = {"ok": not has_fault(found), "findings": [one.as_json() for one in found]}
        sys.stdout.write(json.dumps(findings, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(findings_as_text(found, shutil.get_terminal_size().columns))
    if has_fault(found):
        raise typer.Exit(ExitCode.RUNTIME_FAILURE)


#: Text that YAML reads unquoted, also in a flow collection.
_PLAIN_TEXT: Final = re.compile(r"[A-Za-z_/.][\w./*-]*(:[\w./*-]+)*")
#: Comments start at this column, or two blanks after the end of a longer line.
_MAX_COMMENT_COLUMN: Final = 48


def effective_yaml(values: Iterable[EffectiveValue]) -> str:
    """Return the values as YAML, each with its origin as a comment."""
    pairs = list(_yaml_lines(values))
    width = min(_MAX_COMMENT_COLUMN, max((len(text) for text, comment in pairs if comment), default=0))
    return "".join(f"{text:<{width}}  # {comment}\n" if comment else f"{text}\n" for text, comment in pairs)


def _yaml_lines(values: Iterable[EffectiveValue]) -> Iterator[tuple[str, str]]:
    """Yield each line and its comment; mappings and lists that contain a value have lines of their own."""
    before: Path = ()
    for one in values:
        parents = one.path[:-1]
        pairs = enumerate(zip(before, parents, strict=False))
        shared = next((at for at, (left, right) in pairs if left != right), min(len(before), len(parents)))
        item = False
        for depth, step in enumerate(parents[shared:], shared):
            if isinstance(step, int):
                item = True
            else:
                yield _indented(depth, f"{_yaml_scalar(step)}:", item), ""
                item = False
        text = f"{_yaml_scalar(str(one.path[-1]))}: {_yaml_scalar(one.value)}"
        comment = "default" if one.origin is None else one.where
        if one.origin is Origin.FILE and one.line is not None:
            comment = f"{one.where}:{one.line}"
        yield _indented(len(parents), text, item), comment
        before = parents


def _indented(depth: int, text: str, item: bool) -> str:
    return f"{'  ' * (depth - 1)}- {text}" if item else f"{'  ' * depth}{text}"


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = _PLAIN_TEXT.fullmatch(value) and parse_value(value) == value
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_yaml_scalar(key)}: {_yaml_scalar(one)}" for key, one in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_yaml_scalar, value)) + "]"
    return json.dumps(value)
