"""The command line. ``main`` is the ``gpuserve`` script; one file holds one verb. Data goes to stdout,
everything else to stderr. A verb imports what it needs when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from gpuserve.supervisor.processes.child_process import EarlyFront

#: Those that only print.
_PRINTING_VERBS: Final = frozenset({"schema", "version"})
#: The verbs for a running server. They need little, and start without the rest.
_OPERATOR_VERBS: Final = frozenset(
    {"status", "drain", "load", "unload", "reload", "scale", "events", "logs", "top"}
)


def main() -> NoReturn:
    """Run the command line and exit with one of ``ExitCode``."""
    import gc
    import sys

    _open_standard_descriptors()
    gc.disable()  # until all is imported: nothing of that is garbage
    try:
        if _only_prints(sys.argv):
            _end_with_the_reader()
        if _serves(sys.argv):
            sys.exit(_run_with_front())
        if sys.argv[1:2] and sys.argv[1] in _OPERATOR_VERBS:
            from gpuserve.cli.verbs.operator import run
        else:
            from gpuserve.cli.app import run
        gc.freeze()
        gc.enable()
        sys.exit(run())
    except KeyboardInterrupt:  # while modules are imported
        from gpuserve.cli.console.exit_codes import INTERRUPTED

        sys.exit(INTERRUPTED)


def _open_standard_descriptors() -> None:
    """Open /dev/null on those of the descriptors 0, 1 and 2 that are closed, so that no socket gets their
    numbers and what is printed goes nowhere.
    """
    import os
    import sys

    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            stream = os.fdopen(fd, "r" if fd == 0 else "w", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _only_prints(command: list[str]) -> bool:
    """Whether nothing is asked and nothing served: what is printed is all there is."""
    is_help = not {"-h", "--help", "--version"}.isdisjoint(command)
    return is_help or not command[1:] or command[1] in _PRINTING_VERBS


def _end_with_the_reader() -> None:
    """End quietly, as other commands do, where whoever reads the output has ended: ``head``, a pager."""
    import signal

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _serves(command: list[str]) -> bool:
    verb, arguments = command[1:2], command[2:]
    is_help = not {"-h", "--help"}.isdisjoint(arguments)
    return not is_help and (verb == ["tritonserver"] or (verb in (["serve"], ["dev"]) and bool(arguments)))


def _run_with_front() -> int:
    """Run ``gpuserve serve`` or ``tritonserver``; the front starts while command line and config are read."""
    from gpuserve.cli.console.signals import hold_hangup

    hold_hangup()
    from gpuserve.supervisor.processes.child_process import EarlyFront

    front = EarlyFront()
    front.start()
    try:
        return _serve(front)
    finally:
        front.close()


def _serve(front: EarlyFront) -> int:
    import sys

    from gpuserve.cli.console.failures import exit_code_of, tell
    from gpuserve.cli.console.plain_command import plain_command
    from gpuserve.core.errors import GpuserveError

    try:
        if sys.argv[1] == "tritonserver":
            from gpuserve.cli.verbs.tritonserver import serve_tritonserver

            return serve_tritonserver(sys.argv[2:], front)
        command = plain_command(sys.argv[2:]) if sys.argv[1] == "serve" else None
        if command is not None:
            from gpuserve.cli.console.serving import serve_target

            return serve_target(*command, front)
    except GpuserveError as error:
        return exit_code_of(tell(error))
    from gpuserve.cli.app import run

    return run(front=front)
