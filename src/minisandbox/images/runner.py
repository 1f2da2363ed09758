"""Run a build step in a sandbox that writes to the store's disk, and explain failures."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from minisandbox.errors import BuildError, IndexUnavailable, MiniSandboxError, PatchError
from minisandbox.images.places import BUILD, IMAGE, MOUNTS
from minisandbox.images.python.index import StepAccess, host_access, index_access
from minisandbox.images.python.lock import PACKAGES, packages_fact
from minisandbox.images.python.packages import PackageIndex, Served
from minisandbox.index_settings import host_settings
from minisandbox.launch.plan import Tmpfs
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.sandbox.core import Core
from minisandbox.spec import IndexView
from minisandbox.store import Made, Store
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import disk_full, is_full, store_faults
from minisandbox.types import ExecResult, GiB, ImageSpec, JSONValue, Limits, MiB, Mount, Network, Outcome

PATCH_STATUS = 65
HIDDEN_STATUS = 66

_DISK, _OUTPUT = 16 * GiB, 8 * MiB
_PROCESSES, _OPEN_FILES = 8192, 65536
_TAIL_LINES = 20
_COMPLAINTS = 3
NEARLY_FULL, _ROOMY = 64 * MiB, GiB
"""Free bytes below which a failed step is reported as a full disk: in any case, and if its output reports one."""
_NO_SPACE = ("No space left on device", "Disk quota exceeded")
LEAST_READING = 60.0
"""Minimum seconds for reading a step's files, so that a quick step does not time out on a busy machine."""
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


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One command of a step.

    Attributes:
        title: the name of the command in the log and in errors.
        argv: the program and its arguments; no shell is involved.
    """

    title: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """The commands of one step, and the files, mounts and network that they need.

    Attributes:
        commands: the commands, run one after the other.
        files: (name in ``/tmp/build``, content) of each input file.
        mounts: host directories and files that the commands see.
        environment: variables for this step only.
        index: the visible files of the package index; None for no package index.
        host: whether the commands use the host's network.
        facts: names of files in ``/tmp/build`` whose text is kept in the layer's record.
        patch: the patch's name in errors.
        patch_note: the likely reason if the patch does not apply.
        tools: whether the commands are MiniSandbox's own tools. If so, they run in a sandbox with the host's ``/usr``,
            which has the image's root mounted at :data:`IMAGE`, so the image needs no programs.
    """

    commands: tuple[StepCommand, ...]
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
    """A step that this machine can execute.

    Attributes:
        name: the name of the step in messages and logs.
        definition: all inputs that the result depends on; hashed into the step's key.
        prepare: called with a staging directory before the step runs; returns the work for a sandbox, the finished
            tree, or a function that builds the tree from the step's context.
        detail: details for users.
    """

    name: str
    definition: Mapping[str, JSONValue]
    prepare: Callable[[Path], Work | Made | Callable[[StepContext], Made]]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step at its position in a chain.

    Attributes:
        step: the step itself.
        key: the key of the resulting layer.
        below: the keys of the layers that the step sees, bottom first; empty for a step without layers below.
        environment: the variables that earlier steps set.
        timeout: the step's timeout in seconds.
        needs: the keys of further layers that must exist before the step runs.
        own_root: whether the layers contain a complete root, so that the host's ``/usr`` is not mounted.
        user: the user of the step's commands; "" for root.
        workdir: the initial directory of the step's commands.
    """

    step: BuildStep
    key: str
    below: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    timeout: float
    needs: tuple[str, ...] = ()
    own_root: bool = False
    user: str = ""
    workdir: PurePosixPath = PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class BuildSession:
    """The state that all steps of one build share.

    Attributes:
        store: the store for the layers.
        index: the package index for the steps.
        memory: the memory limit of one step in bytes; None for no limit.
        cancellation: cancels the build: running steps are killed, and their layers are not published.
    """

    store: Store
    index: PackageIndex
    memory: int | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The files, layers and session of one step's execution.

    Attributes:
        image: the name of the image.
        planned: the step.
        layers: trees of the layers below, bottom first.
        staging: an empty directory on the store's disk.
        log: the file for the output.
        session: the shared state of the build.
        helper: the root of the sandbox that MiniSandbox's own tools run in.
    """

    image: str
    planned: PlannedStep
    layers: tuple[Path, ...]
    staging: Path
    log: Path
    session: BuildSession
    helper: Path

    @property
    def step(self) -> str:
        """The step's name."""
        return self.planned.step.name

    @property
    def timeout(self) -> float:
        """The timeout of the whole step in seconds."""
        return self.planned.timeout


def run_step(context: StepContext, work: Work) -> Made:
    """Run a step.

    Args:
        context: the step's context.
        work: the step's work.

    Returns:
        The tree of all files that the step wrote, and its facts.

    Raises:
        BuildError: the step failed or timed out.
        IndexUnavailable: the step failed while the package index was unavailable.
        PatchError: a patch of the recipe does not apply.
        DiskFull: the store's disk is full.
        SandboxCreationError: the sandbox could not be created.
    """
    with _reaching(context, work) as (access, served):
        result = _run_in_sandbox(context, work, access)
    return (
        result
        if served is None
        else replace(result, facts={**result.facts, PACKAGES: packages_fact(served.packages.values())})
    )


@contextmanager
def _reaching(context: StepContext, work: Work) -> Iterator[tuple[StepAccess, Served | None]]:
    """Provide the step's network access while the body runs; add messages of the package index to a build error."""
    if work.index is None:
        yield host_access(None, host_settings(), context.step) if work.host else StepAccess(Network.off(), {}), None
        return
    served = Served(work.index)
    with context.session.index.serve(served) as url:
        try:
            yield host_access(url, host_settings(), context.step) if work.host else index_access(url), served
        except BuildError as error:
            if served.full is not None:  # the removed partial download freed space, so the disk no longer looks full
                raise served.full from error
            error.reason = "\n".join(filter(None, (*_index_reasons(served), error.reason))) or None
            if served.failed is not None:  # the step may have failed only for this reason
                raise IndexUnavailable(
                    f"build step {context.step!r} of image {context.image!r} failed while the package index did",
                    reason=error.reason,
                    hint="see that the index answers, and give the same command again: what is finished is kept; "
                    f"the step's log is {context.log}",
                ) from error
            raise


def _index_reasons(served: Served) -> Iterator[str]:
    if served.undated:
        yield "the package index does not tell when files were uploaded: with exclude_newer none of them counts"
    yield from served.complaints[:_COMPLAINTS]


def _run_in_sandbox(context: StepContext, work: Work, access: StepAccess) -> Made:
    upper = context.staging / "upper"
    upper.mkdir(mode=0o755)
    mounts = (*work.mounts, *access.mounts)
    limits = build_limits(context.session.memory)
    with (
        _sandbox(context, work, limits, access.network, mounts, upper) as box,
        context.session.cancellation.running(box),
    ):
        _write_files(box, context, work)
        _run_commands(box, context, replace(work, environment={**access.environment, **work.environment}))
        facts = {name: box.files.read_text(BUILD / name).strip() for name in work.facts}
    # limit the time for reading the step's files: untrusted code decides their number and size
    return Made(upper / "tree", facts, patience=max(context.timeout, LEAST_READING))


def _sandbox(
    context: StepContext, work: Work, limits: Limits, network: Network, mounts: tuple[Mount, ...], upper: Path
) -> Sandbox:
    """Create a step's sandbox from the image; for MiniSandbox's own tools, a sandbox with the image mounted."""
    name = f"{context.image}: {context.step}"
    if work.tools:
        empty = context.staging / "empty"
        empty.mkdir()
        image = Mount(empty, IMAGE, below=context.layers, upper=upper)
        spec = ImageSpec(name, (context.helper,))
        return build_sandbox(spec, limits, network, (image, *mounts), None)
    planned = context.planned
    spec = ImageSpec(
        name, context.layers, planned.environment, planned.workdir, host_usr=not planned.own_root, user=planned.user
    )
    return build_sandbox(spec, limits, network, mounts, upper)


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
        upper: the directory for the sandbox's writes; None if one of the mounts has the upper directory.
        environment: the complete environment of commands; None for the defaults and the image's variables.
        pretend_owners: whether changes of file owners report success without any effect.
        keep_tmp: whether /tmp is also written to ``upper``.
        tmpfs: tmpfs mounts, at paths without a leading slash.

    Raises:
        SandboxCreationError: the sandbox could not be created.
    """
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


def _write_files(box: Sandbox, context: StepContext, work: Work) -> None:
    if work.tools or not context.planned.own_root:  # the /tmp of a container image is part of its layers
        box.files.mkdir(BUILD)
    for name, content in work.files:
        box.files.write_bytes(BUILD / name, content)


def _run_commands(box: Sandbox, context: StepContext, work: Work) -> None:
    deadline = time.monotonic() + context.timeout
    log, spoke = bytearray(), False
    for command in work.commands:
        remaining = max(deadline - time.monotonic(), 0.1)
        result = box.exec(command.argv, timeout=remaining, env=work.environment)
        log += logged(f"$ {command.title}", result)
        spoke = spoke or bool(result.stdout_bytes or result.stderr_bytes or not result.ok)
        if spoke:  # an empty log would waste a disk block per step
            write_log(context.log, bytes(log))
        if not result.ok:
            raise failure(context, command.title, result, work)


def logged(title: str, result: ExecResult) -> bytes:
    """Return the log entry of a command."""
    dropped = result.dropped_stdout + result.dropped_stderr
    lost = f" ({dropped} bytes of output dropped)" if dropped else ""
    end = f"\n[{result.fate}, {result.duration:.1f} s{lost}]\n"
    return title.encode("utf-8", "replace") + b"\n" + result.stdout_bytes + result.stderr_bytes + end.encode()


def write_log(path: Path, data: bytes) -> None:
    """Write the log of a step.

    Raises:
        DiskFull: the disk is full.
    """
    with store_faults(f"write {path}"):
        write_atomic(path, data)


def failure(context: StepContext, title: str, result: ExecResult, work: Work | None = None) -> MiniSandboxError:
    """Return the error of a step whose command failed.

    Args:
        context: the step's context.
        title: the command as shown in the error.
        result: the result of the command.
        work: the work of a step that runs MiniSandbox's own scripts, whose exit status reports a patch that does not
            apply; None for other steps.
    """
    output = (result.stdout + result.stderr).strip()
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    if _lacked_space(context, output):
        fault = disk_full(f"finish build step {context.step!r} of image {context.image!r}")
        fault.reason = "\n".join(filter(None, (fault.reason, tail)))
        return fault
    if work is not None and result.exit_code == PATCH_STATUS:
        reason = "\n".join(filter(None, (work.patch_note, tail.replace(str(BUILD / "patch"), "the patch"))))
        hint = "make it from the very source that the recipe names"
        return PatchError(f"{work.patch} of image {context.image!r} does not apply", reason=reason, hint=hint)
    logged_part = "the head and the tail of its output are" if result.dropped_stdout else "the whole output is"
    where = "" if title == context.step else f" at {title.splitlines()[0][:120]!r}"
    return BuildError(
        f"build step {context.step!r} of image {context.image!r} failed{where}: {result.fate}",
        step=context.step,
        log=context.log,
        reason="\n".join(filter(None, (_likely(result, tail, context, work), tail))) or None,
        hint=f"{logged_part} in {context.log}",
    )


def _likely(result: ExecResult, tail: str, context: StepContext, work: Work | None) -> str:
    if result.outcome is Outcome.TIMEOUT:
        option = "" if work is None else " (PythonRecipe.step_timeout)"
        return f"the step hangs, or needs more than {context.timeout:.0f} s{option}"
    return next((reason for pattern, reason in _REASONS if work is not None and re.search(pattern, tail)), "")


def _lacked_space(context: StepContext, output: str) -> bool:
    """Return whether the step failed because the store's disk is full.

    Few programs report a full disk (tar does not), so the free space decides. If the output reports a full disk, a
    higher threshold applies, because the program may have removed its files before it exited, as pip does.
    """
    named = any(text in output for text in _NO_SPACE)
    with store_faults(f"look for space for build step {context.step!r}"):
        return is_full(context.staging, _ROOMY if named else NEARLY_FULL)


def mount_points(paths: Sequence[tuple[Path, str]]) -> tuple[Mount, ...]:
    """Return read-only mounts of host paths at names below :data:`MOUNTS`."""
    return tuple(Mount(path, MOUNTS / name) for path, name in paths)
