"""The command line. Data goes to stdout, everything else to stderr. Imports are as late as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from gpuserve.supervisor.processes.child_process import EarlyFront

#: Commands that only print, and so end quietly when the reader of their output closes the pipe.
_PRINTING_COMMANDS: Final = frozenset({"schema", "version"})
#: Commands for a running server: they have an app of their own, because the whole one takes longer to import.
_OPERATOR_COMMANDS: Final = frozenset(
    {"status", "drain", "load", "unload", "reload", "scale", "events", "logs", "top"}
)


def main() -> NoReturn:
    """Run the command line and exit with an ``ExitCode``."""
    import contextlib
    import gc
    import sys

    _open_standard_descriptors()
    gc.disable()  # imported modules are no garbage, so a collection during the imports is wasted
    try:
        verb, arguments = sys.argv[1:2], sys.argv[2:]
        is_help = not {"-h", "--help"}.isdisjoint(sys.argv)
        if is_help or not verb or verb[0] in _PRINTING_COMMANDS or "--version" in sys.argv:
            import signal

            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        is_server = verb == ["tritonserver"] or (verb in (["serve"], ["dev"]) and bool(arguments))
        if is_server and {"-h", "--help"}.isdisjoint(arguments):
            sys.exit(_run_with_early_front())
        if sys.argv[1:2] and sys.argv[1] in _OPERATOR_COMMANDS:
            from gpuserve.cli.operator_commands import run
        else:
            from gpuserve.cli.app import run
        gc.freeze()
        gc.enable()
        status = run()
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.exit(status)
    except OSError as error:
        _report_full_disk(error)
    except KeyboardInterrupt:  # during an import
        from gpuserve.cli.exit_codes import INTERRUPTED

        sys.exit(INTERRUPTED)


def _report_full_disk(error: OSError) -> NoReturn:
    """Exit with one sentence if the output cannot be written because its disk is full. Raise other errors."""
    import errno
    import os
    import sys

    if error.errno != errno.ENOSPC or error.filename is not None:
        raise error
    sys.stderr.write(f"the output cannot be written: {error.strerror}\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest of the output at its exit
    from gpuserve.cli.exit_codes import ExitCode

    sys.exit(ExitCode.RUNTIME_FAILURE)


def _open_standard_descriptors() -> None:
    """Open /dev/null for each closed descriptor of 0, 1 and 2, so that no socket gets its number."""
    import os
    import sys

    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() returns the lowest free number
        if getattr(sys, name) is None:
            stream = os.fdopen(fd, "r" if fd == 0 else "w", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _run_with_early_front() -> int:
    """Run ``serve``, ``dev`` or ``tritonserver``; the front process starts while the config is being read."""
    import signal

    # If the parent left SIGCHLD ignored, the kernel would discard the exit statuses of all children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A SIGHUP stays pending until the supervisor can reload. Front and workers inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from gpuserve.supervisor.processes.child_process import EarlyFront

    front = EarlyFront()
    front.start()
    try:
        return _serve(front)
    finally:
        front.close()


def _serve(front: EarlyFront) -> int:
    import sys

    from gpuserve.cli.exit_codes import exit_code_of, report_error
    from gpuserve.cli.serve_command_line import parse_plain_command
    from gpuserve.core.errors import GpuserveError

    try:
        if sys.argv[1] == "tritonserver":
            from gpuserve.cli.triton_commands import serve_tritonserver

            return serve_tritonserver(sys.argv[2:], front)
        command = parse_plain_command(sys.argv[2:]) if sys.argv[1] == "serve" else None
        if command is not None:
            from gpuserve.cli.serving import serve_target

            return serve_target(*command, front)
    except GpuserveError as error:
        report_error(error)
        return exit_code_of(error)
    from gpuserve.cli.app import run

    return run(front=front)
