"""``minisandbox doctor``: check whether this machine supports sandboxes, and how to fix missing features."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, print_table, put
from minisandbox.errors import HostError
from minisandbox.host import doctor, probes
from minisandbox.images import host_image, installed_interpreters
from minisandbox.images.runner import build_limits, build_sandbox
from minisandbox.launch.kernel import seccomp
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.store.disk.paths import default_root
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import Network

_TRIAL_TIMEOUT = 60.0
_TRIAL_COMMAND = "mkdir -p /opt/a && echo x >/opt/a/b && mv /opt/a /opt/c && cat /opt/c/b >/dev/null && rm -r /opt/c"
"""A command that creates, moves, reads and removes files, as every build does."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    add_json_option(parser)
    parser.add_argument(
        "--seccomp",
        nargs="?",
        metavar="ARCHITECTURE",
        const="",
        choices=("", *seccomp.AUDIT_ARCHITECTURES),
        help="instead, print the sandboxes' system-call filter, with a reason for every call",
    )
    parser.add_argument(
        "--pythons", action="store_true", help="instead, list the Python interpreters that recipes and tasks can name"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks and print the results; return 10 if sandboxes cannot work on this machine."""
    if args.seccomp is not None:
        return _print_filter(args.seccomp, as_json=args.json)
    if args.pythons:
        return _print_pythons(as_json=args.json)
    checks = doctor.run_checks(default_root(), _make_sandbox)
    is_ready = doctor.is_ready(checks)
    if args.json:
        print_json({"ready": is_ready, "mode": checks[-1].detail, "checks": checks})
    else:
        _print(checks, is_ready)
    return exits.OK if is_ready else HostError.exit_code


def _make_sandbox(directory: Path) -> None:
    """Run a command in a normal sandbox and in a build sandbox, which writes to the disk; then remove all files.

    Args:
        directory: the directory for a temporary store.

    Raises:
        MiniSandboxError: a sandbox could not be created, or the command failed.
        OSError: the directory is not writable.
    """
    root = Path(tempfile.mkdtemp(prefix=probes.PREFIX, dir=directory))
    try:
        spec, upper = host_image(Store.open(root)).spec(), root / "upper"
        upper.mkdir(mode=0o755)
        with Sandbox.create(spec) as box:
            box.exec(_TRIAL_COMMAND, timeout=_TRIAL_TIMEOUT).check()
        with build_sandbox(spec, build_limits(None), Network.off(), (), upper) as box:
            box.exec(_TRIAL_COMMAND, timeout=_TRIAL_TIMEOUT).check()
    finally:
        remove_tree(root)


def _print_filter(architecture: str, *, as_json: bool) -> int:
    try:
        lines = list(seccomp.describe(architecture or None))
    except ValueError as error:
        raise HostError(str(error), hint="name one: --seccomp x86_64") from error
    if as_json:
        print_json(lines)
    else:
        put("\n".join(lines))
    return exits.OK


def _print_pythons(*, as_json: bool) -> int:
    interpreters = installed_interpreters()
    if as_json:
        print_json(interpreters)
        return exits.OK
    defaults = {interpreter.minor: interpreter for interpreter in reversed(interpreters)}
    rows = [
        (f"{interpreter.version}{' *' * (defaults[interpreter.minor] is interpreter)}", str(interpreter.executable))
        for interpreter in interpreters
    ]
    print_table(("version", "path"), rows, unwrapped=["version"])
    put("\n* the default for its minor version; `uv python install` and `pyenv install` add others")
    return exits.OK


def _print(checks: tuple[doctor.Check, ...], is_ready: bool) -> None:
    print_table(
        ("status", "feature", "what was found", "needed for"),
        ((check.status, check.name, check.detail, doctor.describe_need(check)) for check in checks),
        unwrapped=("status", "feature"),
    )
    # Print the fixes below the table, because its line breaks would make them hard to copy.
    for check in checks:
        if check.fix:
            put(f"\nfix for {check.name}:\n  {check.fix}")
    missing_features = [check.name for check in checks if check.status is doctor.CheckStatus.MISSING]
    put(f"\n{'ready' if is_ready else 'NOT ready: missing ' + ', '.join(missing_features)}")
