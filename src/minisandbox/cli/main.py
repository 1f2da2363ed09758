"""The ``minisandbox`` command: finds the module of the noun that was typed, and turns errors into messages."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from minisandbox import __version__
from minisandbox.cli import exits
from minisandbox.cli.output import clean_line, ray_tells_stderr, say
from minisandbox.errors import MiniSandboxError

# noun -> what its help line says; each is a module of this package with `configure(parser)`
COMMANDS = {
    "doctor": "what this machine allows, and the exact fix for what it does not",
    "quickstart": "build the bundled tasks, check them, run agents on them, print a table",
    "image": "build, list, verify, remove and move environment images",
    "sandbox": "run commands in isolated workspaces; list, enter and end live ones",
    "tasks": "list, show, choose and export the tasks of a set; put statuses of runs together",
    "validate": "check that tasks tell a solution from none",
    "evaluate": "grade predictions, and report as the SWE-bench harness does",
    "rollout": "let an agent work on tasks, and grade what it submits",
    "cluster": "make machines nodes that do rollouts together; see what they are doing",
    "trajectories": "read the rollouts of a run; choose and write training data",
    "train": "fine-tune a model on trajectories; train it by reinforcement learning in sandboxes",
    "sweagent": "run SWE-agent, with sandboxes as its deployment",
    "model": "fetch and serve the embedded model; capture the tokens that agents' models sample",
}
_AS_IT_IS = contextlib.nullcontext()
_EPILOG = "Exit statuses: docs/reference/exit-codes.md. What a command keeps when it is interrupted, it says."


class _Terminated(KeyboardInterrupt):
    """SIGTERM; handled as Ctrl-C is, so that sandboxes are stopped and files are left whole."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the command's name; the process's own if None.

    Returns:
        The exit status.
    """
    _prepare_streams()
    words, rest = _split(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]  # wherever it stands
    args = argparse.Namespace(rest=rest)
    previous = _on_sigterm()
    try:
        parser(words).parse_args(words, args)
        with ray_tells_stderr() if words[:1] == ["cluster"] or getattr(args, "cluster", None) else _AS_IT_IS:
            status: int = args.run(args)
        sys.stdout.flush()
    except MiniSandboxError as error:
        return _failed(error, debug)
    except KeyboardInterrupt as error:
        return _interrupted(error, args, debug)
    except BrokenPipeError:
        _drop_output()
        return exits.BROKEN_PIPE
    except OSError as error:
        return _refused(error, debug)
    except Exception as error:  # noqa: BLE001 - the outermost frame: a mistake of ours ends in a message, not a trace
        return _unexpected(error, debug)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return status


def _prepare_streams() -> None:
    """Let output be printed whatever it holds (paths need not be UTF-8, terminals neither) and wherever it goes."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # nothing else of ours may be taken for it: the lowest number that is free, 0
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us: Python has None for it then
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Take off what follows ``--`` where it is another program's command line: nested parsers lose track of it."""
    if _noun(words) in ("cluster", "sandbox", "sweagent") and "--" in words:
        return words[: words.index("--")], words[words.index("--") + 1 :]
    return words, []


def _noun(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the options of the noun that ``words`` begin with; the other nouns' modules are not loaded.

    Args:
        words: the command line.

    Returns:
        A parser whose result has ``run``, the function that does it.
    """
    top = argparse.ArgumentParser(prog="minisandbox", description=_first_line(), epilog=_EPILOG)
    top.add_argument("--version", action="version", version=f"minisandbox {__version__}")
    top.add_argument("--debug", action="store_true", help="show where in the program an error came from; anywhere")
    nouns = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = _noun(words)
    for noun, summary in COMMANDS.items():
        sub = nouns.add_parser(noun, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if noun == wanted:
            importlib.import_module(f"minisandbox.cli.{noun}").configure(sub)
    return top


def _first_line() -> str:
    return "Container-free sandboxes for reinforcement learning of software-engineering agents."


def _on_sigterm() -> signal.Handlers | None:
    """Let SIGTERM unwind the program; returns what was there before, or None in a thread that may not ask."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    try:
        previous = signal.signal(signal.SIGTERM, end)
    except ValueError:
        return None
    return previous if isinstance(previous, signal.Handlers) else signal.Handlers.SIG_DFL


def describe(error: MiniSandboxError) -> list[str]:
    """An error as lines: what failed, the likely reason, what to do."""
    lines = [clean_line(f"minisandbox: {error.what}")]
    for label, text in (("likely reason", error.reason), ("what to do", error.hint)):
        if text:
            first, *rest = text.splitlines() or [""]
            lines += [f"  {label}: {first}", *(f"    {line}" for line in rest)]
    log = getattr(error, "log", None)
    return [*lines, f"  log: {log}"] if log and str(log) not in str(error.hint) else lines


def _failed(error: MiniSandboxError, debug: bool) -> int:
    _trace(debug)
    say(*describe(error))
    return error.exit_code


def _interrupted(error: KeyboardInterrupt, args: argparse.Namespace, debug: bool) -> int:
    _trace(debug)
    terminated = isinstance(error, _Terminated)
    say(f"minisandbox: {'terminated' if terminated else 'interrupted'}; {getattr(args, 'kept', 'nothing was changed')}")
    return exits.TERMINATED if terminated else exits.INTERRUPTED


def _drop_output() -> None:
    """What is still buffered must not fail again when Python closes stdout (docs.python.org, library/signal)."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError, debug: bool) -> int:
    if error.errno is None:  # not the operating system's: packages raise such errors, too
        return _unexpected(error, debug)
    _trace(debug)
    _drop_output()
    where = f"{error.filename}: " if error.filename else ""
    what = clean_line(f"minisandbox: {where}{error.strerror or error}")
    say(what, "  what to do: run it again with --debug to see where")
    return exits.SYSTEM


def _unexpected(error: Exception, debug: bool) -> int:
    from minisandbox.cli.foreign_errors import translate  # noqa: PLC0415 - only after a failure

    foreign = translate(error)
    if foreign is not None:
        return _failed(foreign, debug)
    _trace(debug)
    say(
        f"minisandbox: a mistake of MiniSandbox: {type(error).__name__}: {error}",
        "  what to do: run it again with --debug, and report what it prints",
    )
    return exits.INTERNAL


def _trace(debug: bool) -> None:
    if debug:
        say(traceback.format_exc().rstrip())
