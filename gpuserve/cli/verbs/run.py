"""``gpuserve run``: a program that was written for PyTriton, as it is, in a Python of its own in the place of
this one: arguments, streams, signals, tracebacks and status are those of ``python program.py``.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

#: Options behind the program are the program's.
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

    Examples:
      gpuserve run server.py --port 8000
      gpuserve run -m package.server
      gpuserve run --isolation process server.py
      gpuserve run pytriton check

    Options before PROGRAM are of this command, those behind it the program's, and so is the exit status.
    """
    from gpuserve.compat.pytriton.alias import add_to_pythonpath

    environment = dict(os.environ)
    add_to_pythonpath(environment)
    if isolation is not None:
        if isolation not in {"thread", "process"}:
            raise typer.BadParameter(
                f"expected thread or process, given {isolation!r}", param_hint="--isolation"
            )
        environment["GPUSERVE_ISOLATION"] = isolation
    as_module = as_module or (program == "pytriton" and not os.path.exists(program))  # PyTriton's command
    command = [sys.executable, *(["-m"] if as_module else []), program, *(arguments or ())]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)
