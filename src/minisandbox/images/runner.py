"""Run a build step in a sandbox that writes its layer to the store's disk, and explain failures."""

from __future__ import annotations

import re
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Self

from minisandbox.errors import BuildError, IndexUnavailable, MiniSandboxError, PatchError
from minisandbox.images.python.lock import PACKAGES, packages_fact
from minisandbox.images.scripts import BUILD, IMAGE, MOUNTS
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.spec import IndexView
from minisandbox.store import Made, Store
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import disk_full, is_full, store_faults
from minisandbox.types import ExecResult, ImageSpec, Limits, Mount, Network, Outcome
from minisandbox.values import GiB, JSONValue, MiB

if TYPE_CHECKING:
    from minisandbox.images.python.index import StepAccess
    from minisandbox.images.python.packages import PackageIndex, Served
    from minisandbox.launch.plan import Tmpfs
    from minisandbox.sandbox import Sandbox

MERGED = "merged"
"""Name of the layer fact that lists the submodules merged into a source tree."""
_PATCH_STATUS = 65
_DISK, _OUTPUT = 16 * GiB, 8 * MiB
_PROCESSES, _OPEN_FILES = 8192, 65536
_TAIL_LINES = 20
_COMPLAINTS = 3
_NEARLY_FULL, _ROOMY = 64 * MiB, GiB
"""Report a failed step as a full disk below these free bytes: always, or if the output mentions a full disk."""
_NO_SPACE = ("No space left on device", "Disk quota exceeded")
LEAST_READING = 60.0
"""Minimum timeout in seconds for reading a step's files, which can take longer than the step on a busy machine."""
_REASONS = (
    (r"No space left on device", "a file system in the build sandbox is full"),
    (r"Disk quota exceeded", "the quota of the files' owner is used up"),
    (
        r"No solution found|No matching distribution|not found in the package registry|Could not find a version",
        "the package index has no such version for this interpreter",
    ),
    (r"CERTIFICATE_VERIFY_FAILED|invalid peer certificate", "the package index's certificate is not trusted"),
    (
        r"name resolution|dns error|Failed to fetch|Connection refused|ConnectionError|Read timed out|ProxyError",
        "the package index cannot be reached",
    ),
    (r"(?:gcc|cc1plus|g\+\+|clang|rustc|cargo|cmake)\S*:? (?:command )?(?:not found|No such)", "a compiler is missing"),
    (r"fatal error: \S+\.h: No such file", "a C header is missing on the host"),
    (r"Read-only file system", "the command writes where an ordinary user's sandbox is read-only"),
    (r"No module named '?([\w.]+)", "a Python module is missing; name it in PythonRecipe.requirements"),
    (r"MemoryError|Killed|Cannot allocate memory", "it ran out of memory"),
    (r"command not found", "a program is missing on the host"),
)  # fmt: skip


Command = tuple[str, tuple[str, ...]]
"""A command of a step: its title in the log and in errors, and its arguments; no shell is involved."""


@dataclass(frozen=True, slots=True)
class SandboxRun:
    """Commands to run in one sandbox, and the files, mounts and network that they need.

    Attributes:
        commands: the commands, which run one after the other.
        files: (name in ``/tmp/build``, content) of each input file.
        mounts: host directories and files that the commands see.
        environment: variables for this step only.
        index: the visible files of the package index; None for no package index.
        host: whether the commands use the host's network.
        facts: names of files in ``/tmp/build`` whose text becomes a fact in the layer's record.
        patch: the patch's name in errors.
        patch_note: the likely reason if the patch does not apply.
        tools: whether the commands are MiniSandbox's own tools. They run in a sandbox with the host's ``/usr`` and
            with the image's root mounted at :data:`IMAGE`, so the image itself needs no programs.
    """

    commands: tuple[Command, ...]
    files: tuple[tuple[str, bytes], ...] = ()
    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    index: IndexView | None = None
    host: bool = False
    facts: tuple[str, ...] = ()
    patch: str = "patch"
    patch_note: str = ""
    tools: bool = False


@dataclass(frozen=True, slots=True)
class BuildStep:
    """A step that this machine can execute. :class:`.Chain` sets the fields that depend on the steps below.

    Attributes:
        name: the name of the step in messages and logs.
        definition: all inputs that the result depends on; hashed into the step's key.
        make: writes the files of the layer; called with the step's context.
        detail: details for users.
        needs: the keys of further layers that must exist before the step runs.
        key: the key of the resulting layer.
        below: the keys of the layers that the step sees, bottom first; empty for a step without layers below.
        environment: the variables that earlier steps set.
        timeout: the step's timeout in seconds.
        own_root: whether the layers contain a complete root file system, so that the host's ``/usr`` is not mounted.
        user: the user of the step's commands; "" for root.
        workdir: the initial directory of the step's commands.
    """

    name: str
    definition: Mapping[str, JSONValue]
    make: Callable[[StepContext], Made]
    detail: str = ""
    needs: tuple[str, ...] = ()
    key: str = ""
    below: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    timeout: float = 0.0
    own_root: bool = False
    user: str = ""
    workdir: PurePosixPath = PurePosixPath("/")


@dataclass(slots=True)
class BuildSession:
    """The state that all steps of one build share. Use it in a ``with`` block.

    Attributes:
        store: the store for the layers.
        memory: the memory limit of one step in bytes; None for no limit.
        cancellation: cancels the build; then running steps are killed, and their layers are not published.
    """

    store: Store
    memory: int | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)
    _index: PackageIndex | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        """Do nothing: the first step that installs packages creates the package index."""
        return self

    def __exit__(self, *details: object) -> None:
        """Stop the package index."""
        if self._index is not None:
            self._index.__exit__(*details)

    def index(self) -> PackageIndex:
        """Return the package index for the steps."""
        from minisandbox.images.python.packages import PackageIndex  # noqa: PLC0415 - slow to import

        with self._lock:
            if self._index is None:
                self._index = PackageIndex(self.store)
            return self._index


@dataclass(frozen=True, slots=True)
class StepContext:
    """The files, layers and session of one step's execution.

    Attributes:
        image: the name of the image.
        step: the step.
        layers: trees of the layers below, bottom first.
        staging: an empty directory on the store's disk.
        log: the file for the output.
        session: the shared state of the build.
        helper: the tree of the base layer, the root of the sandbox in which MiniSandbox's own tools run.
    """

    image: str
    step: BuildStep
    layers: tuple[Path, ...]
    staging: Path
    log: Path
    session: BuildSession
    helper: Path


def run_step(context: StepContext, run: SandboxRun) -> Made:
    """Run the commands of a step in a sandbox.

    Args:
        context: the step's context.
        run: the commands.

    Returns:
        The tree of all files that the step wrote, and its facts.

    Raises:
        BuildError: the step failed or timed out.
        IndexUnavailable: the step failed while the package index was unavailable.
        PatchError: a patch of the recipe does not apply.
        DiskFull: the store's disk is full.
        SandboxCreationError: the sandbox could not be created.
    """
    with _network_access(context, run) as (access, served):
        output = _run_in_sandbox(context, run, access)
    if served is None:
        return output
    return replace(output, facts={**output.facts, PACKAGES: packages_fact(served.packages.values())})


@contextmanager
def _network_access(context: StepContext, run: SandboxRun) -> Iterator[tuple[StepAccess, Served | None]]:
    """Provide the step's network access while the body runs; add messages of the package index to a build error."""
    from minisandbox.images.python.index import StepAccess, host_access, index_access  # noqa: PLC0415 - slow to import
    from minisandbox.images.python.packages import Served  # noqa: PLC0415 - slow to import
    from minisandbox.index_settings import host_settings  # noqa: PLC0415 - slow to import

    step = context.step.name
    if run.index is None:
        yield host_access(None, host_settings(), step) if run.host else StepAccess(Network.off(), {}), None
        return
    served = Served(run.index)
    with context.session.index().serve(served) as url:
        try:
            yield host_access(url, host_settings(), step) if run.host else index_access(url), served
        except BuildError as error:
            if served.full is not None:  # removing the partial download has freed space again
                raise served.full from error
            error.reason = "\n".join(filter(None, (*_index_reasons(served), error.reason))) or None
            if served.failed is not None:  # the index may be the only cause of the failure
                raise IndexUnavailable(
                    f"build step {step!r} of image {context.image!r} failed while the package index did",
                    reason=error.reason,
                    hint="see that the index answers, and give the same command again: what is finished is kept; "
                    f"the step's log is {context.log}",
                ) from error
            raise


def _index_reasons(served: Served) -> Iterator[str]:
    if served.undated:
        yield "the package index does not tell when files were uploaded: with exclude_newer none of them counts"
    yield from served.complaints[:_COMPLAINTS]


def _run_in_sandbox(context: StepContext, run: SandboxRun, access: StepAccess) -> Made:
    upper = context.staging / "upper"
    upper.mkdir(mode=0o755)
    with _sandbox(context, run, access, upper) as box, context.session.cancellation.running(box):
        _write_files(box, context, run)
        _run_commands(box, context, replace(run, environment={**access.environment, **run.environment}))
        facts = {name: box.files.read_text(BUILD / name).strip() for name in run.facts}
    # Limit the time for reading the files, because untrusted code determines their number and size.
    return Made(upper / "tree", facts, patience=max(context.step.timeout, LEAST_READING))


def _sandbox(context: StepContext, run: SandboxRun, access: StepAccess, upper: Path) -> Sandbox:
    """Create a step's sandbox from the image; for MiniSandbox's own tools, a sandbox with the image mounted."""
    step, limits = context.step, build_limits(context.session.memory)
    name, mounts = f"{context.image}: {step.name}", (*run.mounts, *access.mounts)
    if run.tools:
        empty = context.staging / "empty"
        empty.mkdir()
        image = Mount(empty, IMAGE, below=context.layers, upper=upper)
        spec = ImageSpec(name, (context.helper,))
        return build_sandbox(spec, limits, access.network, (image, *mounts), None)
    spec = ImageSpec(name, context.layers, step.environment, step.workdir, host_usr=not step.own_root, user=step.user)
    return build_sandbox(spec, limits, access.network, mounts, upper)


def build_sandbox(
    spec: ImageSpec,
    limits: Limits,
    network: Network,
    mounts: tuple[Mount, ...],
    upper: Path | None,
    *,
    environment: dict[str, str] | None = None,
    pretend_owners: bool = False,
    keep_tmp: bool = False,
    tmpfs: tuple[Tmpfs, ...] = (),
) -> Sandbox:
    """Create a sandbox that writes to disk; ``limits.disk`` applies only to its /tmp and /dev/shm.

    :meth:`.Sandbox.create` rejects a disk limit together with a directory for writes, because it cannot enforce the
    limit there.

    Args:
        spec: the image.
        limits: the limits of the sandbox.
        network: the network of the sandbox.
        mounts: host directories and files that the sandbox sees.
        upper: the overlay upper directory for the sandbox's writes; None if one of the mounts has it.
        environment: the complete environment of commands; None for the defaults and the image's variables.
        pretend_owners: whether chown(2) succeeds without any effect.
        keep_tmp: whether files in /tmp are also written to ``upper``, instead of to a tmpfs.
        tmpfs: tmpfs mounts, at paths without a leading slash.

    Raises:
        SandboxCreationError: the sandbox could not be created.
    """
    from minisandbox.sandbox import Sandbox  # noqa: PLC0415 - slow to import
    from minisandbox.sandbox.core import Core  # noqa: PLC0415 - slow to import

    core = Core.create(
        spec, limits=limits, network=network, mounts=mounts, upper=upper, pretend_owners=pretend_owners,
        keep_tmp=keep_tmp, tmpfs=tmpfs,
    )  # fmt: skip
    if environment is not None:
        core.environment = environment
    return Sandbox(core)


def build_limits(memory: int | None) -> Limits:
    """Return generous limits for builds, capped by the hard limits of this process.

    Args:
        memory: the memory limit of all processes of the step in bytes; None for no limit.
    """

    def at_most(limit: int, kind: int) -> int:
        hard = resource.getrlimit(kind)[1]
        return limit if hard == resource.RLIM_INFINITY else min(limit, hard)

    return Limits(
        memory=memory,
        disk=_DISK,
        processes=at_most(_PROCESSES, resource.RLIMIT_NPROC),
        open_files=at_most(_OPEN_FILES, resource.RLIMIT_NOFILE),
        output=_OUTPUT,
    )


def _write_files(box: Sandbox, context: StepContext, run: SandboxRun) -> None:
    if run.tools or not context.step.own_root:  # in a container image, /tmp belongs to the layer
        box.files.mkdir(BUILD)
    for name, content in run.files:
        box.files.write_bytes(BUILD / name, content)


def _run_commands(box: Sandbox, context: StepContext, run: SandboxRun) -> None:
    deadline = time.monotonic() + context.step.timeout
    log, has_output = bytearray(), False
    for title, argv in run.commands:
        result = box.exec(argv, timeout=max(deadline - time.monotonic(), 0.1), env=run.environment)
        log += log_entry(f"$ {title}", result)
        has_output = has_output or bool(result.stdout_bytes or result.stderr_bytes or not result.ok)
        if has_output:  # an empty log would waste a disk block per step
            write_log(context.log, bytes(log))
        if not result.ok:
            raise failure(context, title, result, run)


def log_entry(title: str, result: ExecResult) -> bytes:
    """Return the log entry of a command."""
    dropped_bytes = result.dropped_stdout + result.dropped_stderr
    loss = f" ({dropped_bytes} bytes of output dropped)" if dropped_bytes else ""
    status = f"\n[{result.fate}, {result.duration:.1f} s{loss}]\n"
    return title.encode("utf-8", "replace") + b"\n" + result.stdout_bytes + result.stderr_bytes + status.encode()


def write_log(path: Path, log: bytes) -> None:
    """Write the log of a step.

    Raises:
        DiskFull: the disk is full.
    """
    with store_faults(f"write {path}"):
        write_atomic(path, log)


def failure(context: StepContext, title: str, result: ExecResult, run: SandboxRun | None = None) -> MiniSandboxError:
    """Return the error of a step whose command failed.

    Args:
        context: the step's context.
        title: the command as shown in the error.
        result: the result of the command.
        run: the commands of a step with MiniSandbox's own scripts, whose exit status reports a patch that does not
            apply; None for other steps.
    """
    step, output = context.step.name, (result.stdout + result.stderr).strip()
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    if _lacked_space(context, output):
        fault = disk_full(f"finish build step {step!r} of image {context.image!r}")
        fault.reason = "\n".join(filter(None, (fault.reason, tail)))
        return fault
    if run is not None and result.exit_code == _PATCH_STATUS:
        reason = "\n".join(filter(None, (run.patch_note, tail.replace(str(BUILD / "patch"), "the patch"))))
        hint = "make it from the very source that the recipe names"
        return PatchError(f"{run.patch} of image {context.image!r} does not apply", reason=reason, hint=hint)
    logged_part = "the head and the tail of its output are" if result.dropped_stdout else "the whole output is"
    command = "" if title == step else f" at {title.splitlines()[0][:120]!r}"
    return BuildError(
        f"build step {step!r} of image {context.image!r} failed{command}: {result.fate}",
        step=step,
        log=context.log,
        reason="\n".join(filter(None, (_likely_reason(result, tail, context, run), tail))) or None,
        hint=f"{logged_part} in {context.log}",
    )


def _likely_reason(result: ExecResult, tail: str, context: StepContext, run: SandboxRun | None) -> str:
    if result.outcome is Outcome.TIMEOUT:
        option = "" if run is None else " (PythonRecipe.step_timeout)"
        return f"the step hangs, or needs more than {context.step.timeout:.0f} s{option}"
    return next((reason for pattern, reason in _REASONS if run is not None and re.search(pattern, tail)), "")


def _lacked_space(context: StepContext, output: str) -> bool:
    """Return whether the step failed because the store's disk is full.

    Few programs report a full disk (tar does not), so the free space decides. If the output mentions a full disk, a
    higher threshold applies, because programs like pip remove their files before they exit.
    """
    is_reported = any(message in output for message in _NO_SPACE)
    with store_faults(f"look for space for build step {context.step.name!r}"):
        return is_full(context.staging, _ROOMY if is_reported else _NEARLY_FULL)


def mount_points(paths: Sequence[tuple[Path, str]]) -> tuple[Mount, ...]:
    """Return read-only mounts of host paths at names below :data:`MOUNTS`."""
    return tuple(Mount(path, MOUNTS / name) for path, name in paths)
