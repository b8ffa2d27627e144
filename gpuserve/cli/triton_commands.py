"""``gpuserve tritonserver``, whose flags typer cannot parse, and ``gpuserve run``, as their originals."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from gpuserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from gpuserve.compat.tritonserver.option_settings import ConvertedOptions, TritonOptions
    from gpuserve.config.precedence import Override
    from gpuserve.config.problems import Problem
    from gpuserve.supervisor.processes.child_process import EarlyFront


#: All arguments belong to the command, including ``--help``.
TRITONSERVER_SETTINGS: Final[dict[str, Any]] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
#: Triton's flag, and the short one of every gpuserve command.
HELP: Final = frozenset({"--help", "-h"})
_REPOSITORIES: Final = ("model-repository", "model-store")


def tritonserver(
    context: typer.Context,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAG]...", help="The flags of Triton's tritonserver.")
    ] = None,
) -> NoReturn:
    """Serve Triton model repositories with the flags of Triton's own server.

    Example:
      gpuserve tritonserver --model-repository=/models --model-control-mode=poll
    """
    raise typer.Exit(serve_tritonserver(flags or (), context.obj))


def serve_tritonserver(arguments: Sequence[str], early: EarlyFront | None = None) -> int:
    """Serve the repositories of these flags until a signal, and return the exit status. ``early`` is a front
    process that was started before the flags were parsed. Raise GpuserveError if a flag or the configuration
    is wrong, or the models cannot be served.
    """
    from gpuserve.compat.tritonserver.command_line import help_text, read_command_line, spelled
    from gpuserve.compat.tritonserver.option_settings import TritonOptions

    if HELP.intersection(arguments):
        sys.stdout.write(help_text())
        return ExitCode.OK
    line = read_command_line(arguments)
    options = TritonOptions(line.given, spelled)
    meaning = _checked_settings(options, [_flag_problem(one.label, one.text) for one in line.problems])
    from gpuserve.cli.serving import serve_repositories

    notes = [f"{spelled(option)} {text}" for option, text in meaning.notes]
    return serve_repositories(_repository_paths(options), _setting_overrides(meaning), early, notes)


def _checked_settings(options: TritonOptions, problems: list[Problem]) -> ConvertedOptions:
    """Return the settings of the options, or raise ConfigProblems with every problem of the command line."""
    from gpuserve.compat.tritonserver.option_settings import OptionProblem, convert_options
    from gpuserve.config.problems import ConfigProblems

    try:
        meaning = convert_options(options)
    except OptionProblem as error:
        problems.append(_flag_problem(options.spell(error.option), error.text))
    problems += _repository_problems(options)
    if problems:
        raise ConfigProblems(problems)
    return meaning


def _repository_paths(options: TritonOptions) -> list[str]:
    return list(dict.fromkeys(path for name in _REPOSITORIES for path in options.get(name, ())))


def _repository_problems(options: TritonOptions) -> Iterable[Problem]:
    flag = options.spell(_REPOSITORIES[0])
    paths = _repository_paths(options)
    if not paths:
        yield _flag_problem(flag, "expected a folder of models: give this flag once or more")
    for path in paths:
        if "://" in path:
            expected = f"expected a folder of this machine, given {path!r}"
            yield _flag_problem(flag, f"{expected}: copy it here first")


def _flag_problem(label: str, text: str) -> Problem:
    from gpuserve.config.problems import Origin, Problem

    return Problem(label, text, Origin.FLAG)


def _setting_overrides(meaning: ConvertedOptions) -> list[Override]:
    """Return the settings as flags of gpuserve. Without flags for these the server has the name of Triton's,
    and ends if a model fails to load, as Triton's server does.
    """
    from gpuserve.compat.tritonserver.command_line import spelled
    from gpuserve.compat.tritonserver.option_settings import OptionSetting
    from gpuserve.config.precedence import Override
    from gpuserve.config.problems import Origin
    from gpuserve.config.settings.server import TRITON

    settings = [OptionSetting(("exit_on_error",), True, "exit-on-error"), *meaning.settings]
    if all(path != ("name",) for path, _, _ in meaning.settings):
        settings.append(OptionSetting(("compat_name",), TRITON, "id"))
    return [
        Override(
            ("server", *path),
            list(value) if isinstance(value, tuple) else value,
            spelled(option),
            Origin.FLAG,
        )
        for path, value, option in settings
    ]


#: Options after PROGRAM belong to the program.
RUN_SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}


def run_program(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A file; with -m, a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="The program's own arguments.")
    ] = None,
    as_module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as of python -m.")] = False,
    isolation: Annotated[
        str | None,
        typer.Option(
            metavar="thread|process",
            help="Where inference callables run: in threads of the program, as with PyTriton (default), or "
            "in a process each, which is faster and needs them to be picklable.",
            envvar="GPUSERVE_ISOLATION",
        ),
    ] = None,
) -> NoReturn:
    """Run a program that was written for PyTriton: its "import pytriton" finds gpuserve.

    The program replaces this process, so arguments, streams, signals, tracebacks and exit status are those of
    python PROGRAM. Options before PROGRAM belong to this command, options after it to the program.

    Examples:
      gpuserve run server.py --port 8000
      gpuserve run -m package.server
      gpuserve run --isolation process server.py
      gpuserve run pytriton check
    """
    from gpuserve.compat.pytriton.alias import add_to_pythonpath

    environment = dict(os.environ)
    add_to_pythonpath(environment)
    if isolation is not None:
        if isolation not in {"thread", "process"}:
            text = f"expected thread or process, given {isolation!r}"
            raise typer.BadParameter(text, param_hint="--isolation")
        environment["GPUSERVE_ISOLATION"] = isolation
    # "pytriton" is the command of PyTriton's package.
    as_module = as_module or (program == "pytriton" and not os.path.exists(program))
    command = [sys.executable, *(["-m"] if as_module else []), program, *(arguments or ())]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)
