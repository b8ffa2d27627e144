"""``gpuserve tritonserver``: the command line of Triton's server as it is, for a container whose command
changes one word. It is read without typer, which does not read as that binary does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from gpuserve.cli.console.exit_codes import ExitCode

if TYPE_CHECKING:
    from gpuserve.compat.tritonserver.option_settings import ConvertedOptions, TritonOptions
    from gpuserve.config.precedence import Override
    from gpuserve.config.problems import Problem
    from gpuserve.supervisor.processes.child_process import EarlyFront

#: All that stands behind the verb is for the verb, ``--help`` as well.
TRITONSERVER_SETTINGS: Final[dict[str, Any]] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
#: The second is ours: every verb has it.
HELP: Final = frozenset({"--help", "-h"})
_REPOSITORIES: Final = ("model-repository", "model-store")


def tritonserver(
    context: typer.Context,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAG]...", help="The flags of Triton's tritonserver.")
    ] = None,
) -> NoReturn:
    """Serve Triton model repositories, told by the flags of Triton's own server.

    Example:
      gpuserve tritonserver --model-repository=/models --model-control-mode=poll
    """
    raise typer.Exit(serve_tritonserver(flags or (), context.obj))


def serve_tritonserver(arguments: Sequence[str], early: EarlyFront | None = None) -> int:
    """Serve what the flags say until a signal, and return the exit status; ``early`` is a front that already
    starts. GpuserveError: a flag or the configuration is wrong, or it cannot be served.
    """
    from gpuserve.compat.tritonserver.command_line import help_text, read_command_line, spelled
    from gpuserve.compat.tritonserver.option_settings import TritonOptions

    if HELP.intersection(arguments):
        sys.stdout.write(help_text())
        return ExitCode.OK
    line = read_command_line(arguments)
    options = TritonOptions(line.given, spelled)
    meaning = _checked(options, [_problem(one.label, one.text) for one in line.problems])
    if path := options.get("log-file"):
        _append_log_to(path)
    from gpuserve.cli.console.serving import serve_repositories

    notes = [f"{spelled(option)} {text}" for option, text in meaning.notes]
    return serve_repositories(_repositories(options), _overrides(meaning), early, notes)


def _checked(options: TritonOptions, problems: list[Problem]) -> ConvertedOptions:
    """What the options mean. Raises ConfigProblems: all that is wrong with the command line."""
    from gpuserve.compat.tritonserver.option_settings import OptionProblem, convert_options
    from gpuserve.config.problems import ConfigProblems

    try:
        meaning = convert_options(options)
    except OptionProblem as error:
        problems.append(_problem(options.spell(error.option), error.text))
    problems += _repository_problems(options)
    if problems:
        raise ConfigProblems(problems)
    return meaning


def _repositories(options: TritonOptions) -> list[str]:
    return list(dict.fromkeys(path for name in _REPOSITORIES for path in options.get(name, ())))


def _repository_problems(options: TritonOptions) -> Iterable[Problem]:
    flag = options.spell(_REPOSITORIES[0])
    paths = _repositories(options)
    if not paths:
        yield _problem(flag, "expected a folder of models: give this flag once or more")
    for path in paths:
        if "://" in path:
            yield _problem(flag, f"expected a folder of this machine, given {path!r}: copy it here first")


def _problem(label: str, text: str) -> Problem:
    from gpuserve.config.problems import Origin, Problem

    return Problem(label, text, Origin.FLAG)


def _overrides(meaning: ConvertedOptions) -> list[Override]:
    """The settings as flags of ours that were given; a server of Triton's has that name, and ends where a
    model cannot be loaded, unless it is told otherwise.
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


def _append_log_to(path: str) -> None:
    """Have the log of this process and of all that it starts go to a file. ConfigProblems: it cannot."""
    from gpuserve.config.problems import ConfigProblems

    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        text = f"{path!r} cannot be written: {(error.strerror or 'unknown reason').lower()}"
        raise ConfigProblems([_problem("--log-file", text)]) from None
    os.dup2(opened, sys.stderr.fileno())
    os.close(opened)
