"""Run the ``minisandbox`` command: import the module of the given noun, and print errors as messages."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from minisandbox import __version__
from minisandbox.cli.common import exits
from minisandbox.cli.common.output import clean_line, ray_output_to_stderr, say
from minisandbox.errors import MiniSandboxError

# The help line of each noun. A noun is a module of this package, or the module `verbs` of a subpackage, with a function
# `configure(parser)`.
COMMANDS = {
    "doctor": "check what this machine supports, and show how to fix what it lacks",
    "quickstart": "build the bundled tasks, validate them, run agents on them, print a table",
    "image": "pull, build, list, verify, remove and move images",
    "sandbox": "run commands in isolated workspaces; list, enter and end live ones",
    "tasks": "list, check, show, select and export the tasks of a set; merge the results of runs",
    "validate": "check that each task fails before and passes after its reference patch",
    "evaluate": "grade predictions, and report as the SWE-bench harness does",
    "compare": "validate tasks in sandboxes and in podman or docker; print verdicts, time and disk of both",
    "rollout": "run an agent on tasks, and grade its submissions",
    "cluster": "run rollouts on several machines; show their state",
    "trajectories": "read the rollouts of a run; select and write training data",
    "view": "show runs, tasks and rollouts as web pages in your browser",
    "train": "fine-tune a model on trajectories; train it by reinforcement learning in sandboxes",
    "sweagent": "run SWE-agent with sandboxes as its deployment",
    "model": "fetch and serve the embedded model; capture the tokens that agents' models sample",
}
_FOLDERS = ("image", "tasks", "trajectories")
_UNCHANGED = contextlib.nullcontext()
_DESCRIPTION = "Container-free sandboxes for reinforcement learning of software-engineering agents."
_EPILOG = "Exit statuses: docs/reference/exit-codes.md. Interrupted commands report what was saved."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the arguments after the command's name; None uses those of the process.

    Returns:
        The exit status.
    """
    _prepare_streams()
    if arguments is None and sys.argv[1:3] == ["sandbox", "run"] and "--" in sys.argv:
        _start_launcher()
    arguments, command = _split(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]  # accept --debug at any position
    args = argparse.Namespace(rest=command)
    previous_handler = _handle_sigterm(args)
    try:
        parser(arguments).parse_args(arguments, args)
        with ray_output_to_stderr() if arguments[:1] == ["cluster"] or getattr(args, "cluster", None) else _UNCHANGED:
            status: int = args.run(args)
        sys.stdout.flush()
    except MiniSandboxError as error:
        return _failed(error, debug)
    except KeyboardInterrupt:
        return _interrupted(args, debug)
    except BrokenPipeError:
        _drop_output()
        return exits.BROKEN_PIPE
    except OSError as error:
        return _system_error(error, debug)
    except Exception as error:  # noqa: BLE001 - print a message instead of a traceback even for a bug
        return _unexpected(error, debug)
    finally:
        if previous_handler is not None:
            signal.signal(signal.SIGTERM, previous_handler)
    return status


def run() -> NoReturn:
    """Run the command line of this process, with fewer garbage collections and none at exit."""
    gc.set_threshold(50_000)
    status = main()
    gc.freeze()
    sys.exit(status)


def _start_launcher() -> None:
    """Start the launcher of the sandbox in a thread, while this process imports the command's modules."""
    from minisandbox.sandbox.controller import current_controller  # noqa: PLC0415 - other commands need no launcher

    def start() -> None:
        with contextlib.suppress(MiniSandboxError, OSError):  # the command itself reports the error
            current_controller()

    threading.Thread(target=start).start()


def _prepare_streams() -> None:
    """Make output robust: escape unprintable characters, and replace closed streams by /dev/null."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # occupy descriptor 0, so that no other file gets it
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open until exit
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split off the command line of another program after ``--``, because nested parsers drop the ``--``."""
    if _noun(arguments) in ("cluster", "sandbox", "sweagent") and "--" in arguments:
        return arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    return arguments, []


def _noun(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for the noun in ``arguments``, without importing the modules of the other nouns.

    Args:
        arguments: the command line.

    Returns:
        The parser; its result has an attribute ``run``, the function to call.
    """
    top_parser = argparse.ArgumentParser(prog="minisandbox", description=_DESCRIPTION, epilog=_EPILOG)
    top_parser.add_argument("--version", action="version", version=f"minisandbox {__version__}")
    top_parser.add_argument("--debug", action="store_true", help="print the traceback of an error; at any position")
    nouns = top_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    requested_noun = _noun(arguments)
    for noun, summary in COMMANDS.items():
        noun_parser = nouns.add_parser(noun, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if noun == requested_noun:
            name = f"{noun}.verbs" if noun in _FOLDERS else noun
            module = importlib.import_module(f"minisandbox.cli.{name}")
            module.configure(noun_parser, arguments) if noun == "image" else module.configure(noun_parser)
    return top_parser


def _handle_sigterm(args: argparse.Namespace) -> signal.Handlers | None:
    """Handle SIGTERM like Ctrl-C; return the previous handler, or None if this thread cannot set handlers.

    Args:
        args: receives ``terminated`` if the signal arrives.
    """

    def terminate(_signal: int, frame: FrameType | None) -> None:
        args.terminated = True
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # SIGINT is ignored, as in a shell's background jobs
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)  # in an event loop, asyncio's handler, which cancels the tasks

    try:
        previous_handler = signal.signal(signal.SIGTERM, terminate)
    except ValueError:
        return None
    return previous_handler if isinstance(previous_handler, signal.Handlers) else signal.Handlers.SIG_DFL


def describe(error: MiniSandboxError) -> list[str]:
    """Format an error as lines: what failed, the likely reason, what to do, the log."""
    lines = [clean_line(f"minisandbox: {error.what}")]
    for label, text in (("likely reason", error.reason), ("what to do", error.hint)):
        if text:
            first_line, *more_lines = text.splitlines() or [""]
            lines += [f"  {label}: {first_line}", *(f"    {line}" for line in more_lines)]
    log = getattr(error, "log", None)
    return [*lines, f"  log: {log}"] if log and str(log) not in str(error.hint) else lines


def _failed(error: MiniSandboxError, debug: bool) -> int:
    _trace(debug)
    say(*describe(error))
    return error.exit_code


def _interrupted(args: argparse.Namespace, debug: bool) -> int:
    _trace(debug)
    is_sigterm = hasattr(args, "terminated")
    say(f"minisandbox: {'terminated' if is_sigterm else 'interrupted'}; {getattr(args, 'kept', 'nothing was changed')}")
    return exits.TERMINATED if is_sigterm else exits.INTERRUPTED


def _drop_output() -> None:
    """Discard buffered output, because flushing it at exit would fail again (docs.python.org, library/signal)."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _system_error(error: OSError, debug: bool) -> int:
    if error.errno is None:  # raised by a Python package, not by a system call
        return _unexpected(error, debug)
    _trace(debug)
    _drop_output()
    prefix = f"{error.filename}: " if error.filename else ""
    message = clean_line(f"minisandbox: {prefix}{error.strerror or error}")
    say(message, "  what to do: run it again with --debug to see where")
    return exits.SYSTEM


def _unexpected(error: Exception, debug: bool) -> int:
    from minisandbox.cli.common.foreign_errors import translate  # noqa: PLC0415 - needed only after a failure

    package_error = translate(error)
    if package_error is not None:
        return _failed(package_error, debug)
    _trace(debug)
    say(
        f"minisandbox: a bug in MiniSandbox: {type(error).__name__}: {error}",
        "  what to do: run it again with --debug, and report the output",
    )
    return exits.INTERNAL


def _trace(debug: bool) -> None:
    if debug:
        say(traceback.format_exc().rstrip())
