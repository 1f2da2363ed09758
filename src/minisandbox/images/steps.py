"""Translate the steps of a recipe into build steps, with the inputs of their keys and the commands to run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from minisandbox import spec as r
from minisandbox.errors import HostError
from minisandbox.images.python.index import find_uv
from minisandbox.images.python.interpreters import PROBE_TIMEOUT, Interpreter
from minisandbox.images.python.lock import INSTALLED
from minisandbox.images.python.prefix import PREFIX_VERSION, copy_prefix
from minisandbox.images.python.torch_builds import names_torch, without_cuda
from minisandbox.images.runner import MERGED, BuildStep, Command, SandboxRun, mount_points, run_step
from minisandbox.images.scripts import IMAGE, RANKS, script
from minisandbox.images.sources.localsource import SourceSnapshot
from minisandbox.images.sources.mirrors import Mirrors, origin
from minisandbox.images.sources.sdist import fetch_sdist
from minisandbox.index_settings import npm_files, npm_variables
from minisandbox.patches import explain_line_endings, parse_patch, touched_files
from minisandbox.sandbox.controller import current_controller
from minisandbox.spec import EVERYTHING, TORCH_BACKEND, IndexView, InstallSystem
from minisandbox.store import Store, step_key
from minisandbox.store.disk.faults import store_faults
from minisandbox.values import JSONValue

ENVIRONMENT = "/opt/miniconda3/envs/testbed"
AGENT = "/opt/minisandbox/agent"
"""The directory of an agent's program."""
AGENT_PYTHON = ">=3.10"
_BUILD_PYTHON = "/var/tmp/python"  # noqa: S108 - in the sandbox, removed with it
DESCRIBED = "described"
"""Name of the fact of a source layer with the ``git describe`` output for its commit."""
"""Name of the fact of a source layer that lists the submodules whose files are in the layer, one path per line."""
UV_MINIMUM = (3, 8)

_MODULES = ("zlib", "ssl", "hashlib", "sqlite3", "ctypes", "bz2", "lzma", "readline", "curses", "pip")
_FIRST_PERSON = 1000
# apt's sources and trusted keys, but never auth.conf, which contains passwords.
_SETTINGS = ("sources.list", "sources.list.d", "trusted.gpg", "trusted.gpg.d", "keyrings", "preferences.d")


def python_step(step: r.InstallPython, interpreter: Interpreter) -> BuildStep:
    """Return the step that creates the environment: a copy of a prefix, or a virtual environment."""
    is_copied = interpreter.own_prefix
    kind = "python_copy" if is_copied else "python_venv"
    script_text = step_script("python", kind, "python_check")
    definition: dict[str, JSONValue] = {
        "kind": kind,
        "version": interpreter.version,
        "abi": interpreter.abi,
        "build": interpreter.build,
        "stamp": interpreter.stamp,
        "scripts": _digest(script_text),
        **({"copy": PREFIX_VERSION} if is_copied else _pinned(step.index)),
    }

    def prepare(staging: Path) -> SandboxRun:
        modules = _importable(interpreter) if is_copied else ()
        variables = {
            "PYTHON_VERSION": interpreter.version,
            "PYTHON_MODULES": " ".join(modules),
            "SYSTEM_PYTHON": str(interpreter.executable),
        }
        run = SandboxRun((_bash("python", script_text),), environment=variables)
        if not is_copied:
            return _with_uv(run, step.index)
        with store_faults(f"copy Python {interpreter.version} from {interpreter.prefix}"):
            copy_prefix(interpreter, staging / "prefix", ENVIRONMENT)
        return replace(run, mounts=mount_points([(staging / "prefix", "prefix")]))

    return _sandboxed("python", definition, prepare, f"{interpreter.version} ({'copy' if is_copied else 'venv'})")


def agent_step(step: r.InstallAgent, interpreter: Interpreter) -> BuildStep:
    """Return the step that installs an agent's program; npm uses the user's configuration."""
    script_text = step_script("install", "agent", AGENT=AGENT)
    definition: dict[str, JSONValue] = {"kind": "agent", "scripts": _digest(script_text), "title": step.title}
    if step.python:
        definition |= {"python": list(step.python), "interpreter": [interpreter.version, interpreter.stamp]}
    if step.npm:
        definition |= {"npm": list(step.npm), "node": step.node}
    files = (("requirements.txt", "\n".join(step.python).encode()), ("npm.txt", " ".join(step.npm).encode()))

    def prepare(staging: Path) -> SandboxRun:
        variables = {
            "AGENT_PYTHON": "yes" if step.python else "", "BUILD_PYTHON": _BUILD_PYTHON, "NODE": step.node,
            "SYSTEM_PYTHON": str(interpreter.executable), **npm_variables(os.environ),
        }  # fmt: skip
        mounts = [(path, "npmrc") for path in npm_files(os.environ)]
        if interpreter.own_prefix and (step.python or step.npm):
            with store_faults(f"copy Python {interpreter.version} from {interpreter.prefix}"):
                copy_prefix(interpreter, staging / "prefix", f"{AGENT}/python" if step.python else _BUILD_PYTHON)
            mounts.append((staging / "prefix", "prefix"))
        commands = (_bash("agent", script_text),)
        run = SandboxRun(commands, files, mount_points(mounts), variables, host=bool(step.npm))
        return _with_uv(run, EVERYTHING)

    return _sandboxed("agent", definition, prepare, step.title)


def requirements_step(step: r.InstallRequirements, interpreter: Interpreter) -> BuildStep:
    """Return the step that installs the pinned packages with uv, or with pip if uv does not support the interpreter."""
    tool = "uv" if _modern(interpreter) else "pip"
    script_text = step_script("requirements", f"freeze_{tool}", f"requirements_{tool}")
    step = _without_cuda(step)
    listing = "".join(f"{line}\n" for line in step.requirements)
    definition: dict[str, JSONValue] = {
        "kind": "requirements",
        "requirements": list(step.requirements),
        "scripts": _digest(script_text),
        **({"complete": True} if step.complete else {}),
        **({"overrides": list(step.overrides)} if step.overrides else {}),
        **_pinned(step.index),
    }

    def prepare(_: Path) -> SandboxRun:
        files = (("requirements.txt", listing.encode()), ("overrides.txt", "\n".join(step.overrides).encode()))
        variables = {"COMPLETE": "--no-deps" if step.complete else ""}
        run = SandboxRun((_bash("requirements", script_text),), files=files, environment=variables, facts=(INSTALLED,))
        return _with_uv(run, step.index)

    count = len(step.requirements + step.overrides)
    return _sandboxed("requirements", definition, prepare, f"{count} packages, {tool}")


def command_step(step: r.Run, workdir: PurePosixPath) -> BuildStep:
    """Return the step that runs a command in the image."""
    definition: dict[str, JSONValue] = {
        "kind": "run",
        "argv": list(step.argv),
        "environment": dict(step.environment),
        "workdir": str(step.workdir or workdir),
        "user": step.user,
        "network": step.network,
    }
    title = " ".join(step.argv)
    variables = {**dict(step.environment), **dict(step.unkeyed)}
    index = EVERYTHING if step.network == "index" else None
    run = SandboxRun(((title, step.argv),), environment=variables, index=index, host=step.network == "host")
    return _sandboxed("run", definition, lambda _: run, title)


def git_step(source: r.GitSource, mirrors: Mirrors, timeout: float, workdir: PurePosixPath) -> BuildStep:
    """Return the step that writes a commit's files to the workdir.

    Args:
        source: the repository and commit.
        mirrors: the mirrors to read from.
        timeout: the timeout of a fetch in seconds.
        workdir: the directory in the image.
    """
    script_text = tool_script("source", workdir, "source_git", "source_check")

    def prepare(staging: Path) -> SandboxRun:
        with store_faults(f"fetch {source.commit}"):
            commit = mirrors.take(source, staging, timeout=timeout)
        return SandboxRun(
            (_bash("source", script_text),),
            files=(
                (DESCRIBED, commit.described.encode()),
                (MERGED, "\n".join(commit.submodules).encode("utf-8", "replace")),
            ),
            environment={"GIT_TREE": commit.tree},
            mounts=mount_points([(commit.pack, "pack")]),
            facts=("submodules", "pointers", DESCRIBED, MERGED),
            tools=True,
        )

    definition: dict[str, JSONValue] = {
        "kind": "git",
        "commit": source.commit,
        "origin": origin(source),
        "tells": [DESCRIBED],
        "scripts": _digest(script_text),
    }
    if _left_submodules_empty(mirrors.store, step_key(None, definition)):
        definition["submodules"] = "merged"
    return _sandboxed("source", definition, prepare, source.commit[:12])


def _left_submodules_empty(store: Store, key: str) -> bool:
    """Return whether a layer exists and was built by an old version of MiniSandbox, which left submodules empty."""
    facts = store.layer(key).facts if store.has_layer(key) else {}
    return bool(facts.get("submodules")) and MERGED not in facts


def sdist_step(source: r.SdistSource, store: Store, workdir: PurePosixPath) -> BuildStep:
    """Return the step that unpacks a source archive into the workdir."""

    def archive(_: Path) -> Path:
        return fetch_sdist(source, store)

    definition: dict[str, JSONValue] = {"kind": "sdist", "sha256": source.sha256}
    return _archive_step(definition, archive, f"{source.name} {source.version}", workdir, strip=1)


def local_step(source: r.LocalSource, snapshot: SourceSnapshot, workdir: PurePosixPath) -> BuildStep:
    """Return the step that copies a directory of this machine to the workdir."""

    def archive(staging: Path) -> Path:
        with store_faults(f"pack {snapshot.root}"):
            snapshot.write_archive(staging / "local.tar")
        return staging / "local.tar"

    definition: dict[str, JSONValue] = {"kind": "local", "files": snapshot.digest}
    return _archive_step(definition, archive, str(source.path), workdir, strip=0)


def _archive_step(
    definition: Mapping[str, JSONValue],
    archive: Callable[[Path], Path],
    detail: str,
    workdir: PurePosixPath,
    *,
    strip: int,
) -> BuildStep:
    script_text = tool_script("source", workdir, "source_archive", "source_check")

    def prepare(staging: Path) -> SandboxRun:
        mounts = mount_points([(archive(staging), "archive")])
        return SandboxRun((_bash("source", script_text),), environment={"STRIP": str(strip)}, mounts=mounts, tools=True)

    return _sandboxed("source", {**definition, "scripts": _digest(script_text)}, prepare, detail)


def repository_step(workdir: PurePosixPath) -> BuildStep:
    """Return the step that creates the git objects of a source, which all tasks of the source share."""
    script_text = tool_script("repository", workdir, "repository")
    run = SandboxRun((_bash("repository", script_text),), tools=True)
    return _sandboxed("repository", {"kind": "repository", "scripts": _digest(script_text)}, lambda _: run)


def install_step(step: r.Install, interpreter: Interpreter | None, described: str, workdir: PurePosixPath) -> BuildStep:
    """Return the step that runs the install commands of a recipe.

    Args:
        step: the install commands.
        interpreter: the interpreter of the image, or None.
        described: the ``git describe`` output for the source's commit, or "".
        workdir: the source's directory.
    """
    history = step_script("install", "install_history", WORKDIR=str(workdir))
    freeze = () if interpreter is None else ("freeze_uv" if _modern(interpreter) else "freeze_pip", "freeze")
    settle = step_script("install", "install_settle", *freeze, WORKDIR=str(workdir))
    last_tag = described or (f"{step.version}-0-g0" if step.version else "")
    definition: dict[str, JSONValue] = {
        "kind": "install",
        "commands": list(step.commands),
        "environment": dict(step.environment),
        "scripts": _digest(history + settle),
        **({"last_tag": last_tag} if last_tag else {}),
        **({} if step.network == "index" else {"network": step.network}),
        **_pinned(step.index),
    }

    def prepare(_: Path) -> SandboxRun:
        commands = (_bash("history", history), *map(_recipe_command, step.commands), _bash("install", settle))
        facts = () if interpreter is None else (INSTALLED,)
        variables = {"LAST_TAG": last_tag, **dict(step.environment)}
        return _with_network(_with_uv(SandboxRun(commands, environment=variables, facts=facts)), step)

    return _sandboxed("install", definition, prepare, "; ".join(step.commands))


def plain_install_steps(step: r.Install, workdir: PurePosixPath) -> Iterator[BuildStep]:
    """Yield the steps that run a recipe's install commands in a container image, which may have only a shell."""
    definition: dict[str, JSONValue] = {
        "kind": "install", "commands": list(step.commands), "environment": dict(step.environment),
        "workdir": str(workdir), "network": step.network, **_pinned(step.index),
    }  # fmt: skip
    commands = tuple((command.strip(), ("/bin/sh", "-ec", command)) for command in step.commands)
    install = _with_network(SandboxRun(commands, environment=dict(step.environment)), step)
    yield _sandboxed("install", definition, lambda _: install, "; ".join(step.commands))
    script_text = tool_script("install", workdir, "tidy")
    tidy = SandboxRun((_bash("tidy", script_text),), tools=True)
    yield _sandboxed("tidy", {"kind": "tidy", "scripts": _digest(script_text)}, lambda _: tidy)


def task_step(step: r.CutHistory, source: Callable[[], Path], workdir: PurePosixPath) -> BuildStep:
    """Return the step that prepares the agent's repository: apply the patch, remove hidden files, create one commit.

    Args:
        step: the patch and hidden files.
        source: returns the tree of the layer with the unmodified source.
        workdir: the source's directory.
    """

    def prepare() -> SandboxRun:
        return SandboxRun((), mounts=mount_points([(source(), "source")]), facts=("commit",))

    scripts = ("task_source", "task_files", "task_commit", "task_check")
    return _patched({"kind": "task", "patch": step.patch}, step.hidden, workdir, prepare, *scripts)


def image_source_step(source: r.ImageSource, workdir: PurePosixPath) -> BuildStep:
    """Return the step that resets a container image's repository to a commit and removes later history.

    Args:
        source: the commit, and the history to remove.
        workdir: the repository's directory.
    """
    script_text = tool_script("source", workdir, "image_repository", "image_source")
    definition: dict[str, JSONValue] = {
        "kind": "image source", "commit": source.commit, "remove": list(source.remove), "scripts": _digest(script_text),
    }  # fmt: skip
    files = (("remove", _list(source.remove)),)
    run = SandboxRun((_bash("source", script_text),), files=files, environment={"COMMIT": source.commit}, tools=True)
    return _sandboxed("source", definition, lambda _: run, source.commit[:12])


def image_task_step(step: r.CutHistory, commit: str, workdir: PurePosixPath) -> BuildStep:
    """Return the step that prepares a container image's own repository, as :func:`task_step` does.

    Args:
        step: the patch and hidden files.
        commit: the commit that the files were reset to; "" for HEAD.
        workdir: the repository's directory.
    """
    run = SandboxRun((), environment={"COMMIT": commit}, facts=("commit", "submodules", MERGED))
    definition: dict[str, JSONValue] = {"kind": "image task", "patch": step.patch, "commit": commit}
    scripts = ("image_repository", "image_open", "task_files", "image_commit", "task_check")
    return _patched(definition, step.hidden, workdir, lambda: run, *scripts)


def tests_step(step: r.HiddenTests, workdir: PurePosixPath) -> BuildStep:
    """Return the step that creates the layer of hidden tests."""
    definition: dict[str, JSONValue] = {"kind": "tests", "test_patch": step.test_patch}
    return _patched(definition, step.hidden, workdir, lambda: SandboxRun(()), "tests")


def _patched(
    definition: Mapping[str, JSONValue],
    hidden: Sequence[str],
    workdir: PurePosixPath,
    prepare: Callable[[], SandboxRun],
    *scripts: str,
) -> BuildStep:
    """Return the step that applies a patch and removes hidden files.

    Args:
        definition: the inputs of the step's key except the script and the hidden files; it contains the patch.
        hidden: paths of the hidden files in the repository.
        workdir: the repository's directory.
        prepare: returns a :class:`SandboxRun` without commands and files.
        scripts: names of the script's parts.
    """
    is_tests = "test_patch" in definition
    name, label = ("tests", "the test patch") if is_tests else ("task", "the patch")
    script_text = tool_script(name, workdir, "patching", *scripts)
    patch = str(definition["test_patch" if is_tests else "patch"])

    def with_patch(_: Path) -> SandboxRun:
        files = [("hidden", _list(hidden)), ("touched", _list(touched_files(patch)))]
        if patch.strip():
            files.append(("patch", patch.encode("utf-8", "surrogateescape")))
        note = explain_line_endings(parse_patch(patch)) or ""
        commands = (_bash(name, script_text),)
        return replace(prepare(), commands=commands, files=tuple(files), patch=label, patch_note=note, tools=True)

    return _sandboxed(name, {**definition, "hidden": sorted(hidden), "scripts": _digest(script_text)}, with_patch)


def _sandboxed(
    name: str, definition: Mapping[str, JSONValue], prepare: Callable[[Path], SandboxRun], detail: str = ""
) -> BuildStep:
    """Return a step that runs in a sandbox; ``prepare`` returns its commands, given a staging directory."""
    return BuildStep(name, definition, lambda context: run_step(context, prepare(context.staging)), detail)


def step_script(step: str, *names: str, **variables: str) -> str:
    """Return the script of a step that runs in the image.

    Args:
        step: the name of the step.
        names: the parts of the script, as in :func:`.script`.
        variables: further variables of the script.
    """
    return script(*names, RANK=str(RANKS.index(step)), ENVIRONMENT=ENVIRONMENT, **variables)


def tool_script(step: str, workdir: PurePosixPath, *names: str) -> str:
    """Return the script of a step that runs MiniSandbox's own tools; see :attr:`.SandboxRun.tools`."""
    return step_script(step, "tools", *names, ROOT=str(IMAGE), WORKDIR=f"{IMAGE}{workdir}", INSIDE=str(workdir))


def _bash(title: str, script_text: str) -> Command:
    return title, ("bash", "-c", script_text)


def _recipe_command(command: str) -> Command:
    """Return the shell command for a recipe's command; it stops at the first error and merges stderr into stdout."""
    return _bash(command.strip(), f"set -e\nexec 2>&1\n{command}\n")


def _with_uv(run: SandboxRun, index: IndexView | None = None) -> SandboxRun:
    """Return the run with uv and access to the package index."""
    return replace(run, mounts=(*run.mounts, *mount_points([(find_uv(), "uv")])), index=index)


def _with_network(run: SandboxRun, step: r.Install) -> SandboxRun:
    """Return the run with the network that a recipe allows for its install commands."""
    return replace(run, index=None if step.network == "off" else step.index, host=step.network == "host")


def _pinned(index: IndexView) -> dict[str, JSONValue]:
    """Return the part of a step's definition that describes the visible files of the package index."""
    backend: dict[str, JSONValue] = {TORCH_BACKEND: index.torch_backend} if index.torch_backend else {}
    if index.locked is not None:
        files = "\n".join(f"{package.file} {package.sha256}" for package in sorted(index.locked))
        return backend | {"locked": _digest(files)}
    return backend | ({"exclude_newer": index.exclude_newer} if index.exclude_newer else {})


def _without_cuda(step: r.InstallRequirements) -> r.InstallRequirements:
    """Adapt requirements to the PyTorch backend; drop the backend if a complete list of requirements has no PyTorch."""
    if not step.index.torch_backend:
        return step
    if names_torch(step.requirements + step.overrides):
        return replace(step, requirements=without_cuda(step.requirements), overrides=without_cuda(step.overrides))
    return replace(step, index=replace(step.index, torch_backend="")) if step.complete else step


def _modern(interpreter: Interpreter) -> bool:
    """Return whether uv supports the interpreter."""
    return tuple(map(int, interpreter.minor.split("."))) >= UV_MINIMUM


def _importable(interpreter: Interpreter) -> tuple[str, ...]:
    """Return the importable modules that need libraries of the host; a copy of the interpreter must import them too."""
    code = (
        "import sys\nfor name in sys.argv[1:]:\n try:\n  __import__(name)\n  print(name)\n except Exception:\n  pass\n"
    )
    command = [str(interpreter.executable), "-E", "-s", "-c", code, *_MODULES]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(name for name in probe.stdout.split() if name in _MODULES)


def _list(paths: Sequence[str]) -> bytes:
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in sorted(paths))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def system_step(step: InstallSystem) -> BuildStep:
    """Return the step that installs packages of the host's distribution with apt-get.

    Raises:
        HostError: this machine has no apt, or sandboxes of this user cannot write below ``/usr``.
    """
    script_text = script("system_apt", RANK=str(RANKS.index("system")))
    definition: dict[str, JSONValue] = {
        "kind": "system", "packages": list(step.packages), "scripts": _digest(script_text),
    }  # fmt: skip

    def prepare(staging: Path) -> SandboxRun:
        _check_host(step.packages)
        with store_faults("copy apt's settings"):
            _copy_settings(staging / "apt")
        mounts = mount_points([(staging / "apt", "apt"), (Path("/var/lib/dpkg"), "dpkg")])
        packages = "".join(f"{package}\n" for package in step.packages)
        system_files = (("passwd", _system_entries("passwd")), ("group", _system_entries("group")))
        files = (("packages", packages.encode()), *system_files)
        return SandboxRun((_bash("system", script_text),), files=files, mounts=mounts, host=True, facts=("versions",))

    return _sandboxed("system", definition, prepare, " ".join(step.packages))


def _check_host(packages: tuple[str, ...]) -> None:
    subject = f"system packages ({' '.join(packages)})"
    if shutil.which("apt-get") is None or not Path("/var/lib/dpkg/status").is_file():
        raise HostError(
            f"{subject} cannot be installed here",
            reason="this machine has no apt-get, the only package manager that is supported",
            hint="install them on the machine itself (images show its /usr) and leave them out of the recipe",
        )
    if not current_controller().launcher.writable_usr:
        raise HostError(
            f"{subject} cannot be installed by this user",
            reason="the host's /usr belongs to the host's root, so an ordinary user's sandboxes show it read-only",
            hint="install them on the machine itself (images show its /usr) and leave them out of the recipe, "
            "or build the image as root",
        )


def _system_entries(name: str) -> bytes:
    """Return the lines of the host's system users or groups, which packages need, without personal accounts."""
    lines = []
    for line in Path("/etc", name).read_text("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and fields[2].isdecimal() and int(fields[2]) < _FIRST_PERSON:
            lines.append(":".join((fields[0], "x", *fields[2:])) if name == "passwd" else f"{fields[0]}:x:{fields[2]}:")
    return "".join(f"{line}\n" for line in lines).encode()


def _copy_settings(target: Path) -> None:
    target.mkdir()
    for name in _SETTINGS:
        source = Path("/etc/apt", name)
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.is_file():
            shutil.copyfile(source, target / name)
