"""The steps of a recipe: what each is keyed by, and what it does when it has to be made."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from minisandbox.images.index import parse_moment
from minisandbox.images.localsource import Snapshot
from minisandbox.images.lock import INSTALLED, Package
from minisandbox.images.mirrors import Mirrors, origin
from minisandbox.images.places import MOUNTS
from minisandbox.images.prefix import PREFIX_VERSION, copy_prefix
from minisandbox.images.probe import PROBE_TIMEOUT, Interpreter
from minisandbox.images.recipe import GitSource, LocalSource, Recipe, SdistSource
from minisandbox.images.runner import Command, StepNetwork, Work, mount_points
from minisandbox.images.scripts import script
from minisandbox.images.sdist import fetch_sdist
from minisandbox.images.stepping import Step
from minisandbox.images.torch_builds import BACKEND, names_torch, without_cuda
from minisandbox.images.uvtool import find_uv
from minisandbox.patches import explain_line_endings, parse_patch, touched_files
from minisandbox.store import Store
from minisandbox.store.faults import store_faults
from minisandbox.store.keys import JSONValue
from minisandbox.types import Mount

ENVIRONMENT = "/opt/miniconda3/envs/testbed"
DESCRIBED = "described"
"""The fact of a source's layer that says what git calls its commit, by its last tag."""
UV_MINIMUM = (3, 8)

_MODULES = ("zlib", "ssl", "hashlib", "sqlite3", "ctypes", "bz2", "lzma", "readline", "curses", "pip")


def python_step(interpreter: Interpreter, recipe: Recipe) -> Step:
    """The step that makes the environment: a copy of a prefix, or a virtual environment over the system's."""
    kind = "python_copy" if interpreter.own_prefix else "python_venv"
    text = script(kind, "python_check")
    definition: dict[str, JSONValue] = {
        "kind": kind,
        "version": interpreter.version,
        "abi": interpreter.abi,
        "build": interpreter.build,
        "stamp": interpreter.stamp,
        "scripts": _digest(text),
    }
    if interpreter.own_prefix:
        definition["copy"] = PREFIX_VERSION
    else:
        definition |= _pinned(recipe, "python")

    def prepare(staging: Path) -> Work:
        modules = _importable(interpreter) if interpreter.own_prefix else ()
        variables = {"PYTHON_VERSION": interpreter.version, "PYTHON_MODULES": " ".join(modules)}
        if interpreter.own_prefix:
            with store_faults(f"copy Python {interpreter.version} from {interpreter.prefix}"):
                copy_prefix(interpreter, staging / "prefix", ENVIRONMENT)
            return Work(
                (Command("python", text),), environment=variables, mounts=mount_points([(staging / "prefix", "prefix")])
            )
        variables["SYSTEM_PYTHON"] = str(interpreter.executable)
        return _networked(Work((Command("python", text),), environment=variables), recipe, "python")

    return Step(
        "python", definition, prepare, f"{interpreter.version} ({'copy' if interpreter.own_prefix else 'venv'})"
    )


def requirements_step(recipe: Recipe, interpreter: Interpreter) -> Step:
    """The step that installs the pinned packages: with uv where it supports the interpreter, with its pip elsewhere."""
    tool = "uv" if _modern(interpreter) else "pip"
    text = script(f"freeze_{tool}", f"requirements_{tool}")
    recipe = _without_cuda(recipe)
    listed = "".join(f"{line}\n" for line in recipe.requirements)
    definition: dict[str, JSONValue] = {
        "kind": "requirements",
        "requirements": list(recipe.requirements),
        "scripts": _digest(text),
        **({"complete": True} if recipe.complete else {}),
        **({"overrides": list(recipe.overrides)} if recipe.overrides else {}),
        **_pinned(recipe, "requirements"),
    }

    def prepare(_: Path) -> Work:
        files = (("requirements.txt", listed.encode()), ("overrides.txt", "\n".join(recipe.overrides).encode()))
        variables = {"COMPLETE": "--no-deps" if recipe.complete else ""}
        work = Work((Command("requirements", text),), files=files, environment=variables, facts=(INSTALLED,))
        return _networked(work, recipe, "requirements")

    return Step("requirements", definition, prepare, f"{len(recipe.requirements + recipe.overrides)} packages, {tool}")


def git_step(source: GitSource, mirrors: Mirrors, timeout: float, on_made: Callable[[], None] = lambda: None) -> Step:
    """The step that puts a commit's files at ``/testbed``, in place of another commit's if they are there.

    Args:
        source: which one.
        mirrors: where it is taken from.
        timeout: seconds that fetching may take.
        on_made: called when it is about to be made.
    """
    text = script("source_git", "source_check")

    def prepare(staging: Path) -> Work:
        with store_faults(f"fetch {source.commit}"):
            taken = mirrors.take(source, staging, timeout=timeout)
        on_made()
        return Work(
            (Command("source", text),),
            files=((DESCRIBED, taken.described.encode()),),
            environment={"GIT_TREE": taken.tree},
            mounts=mount_points([(taken.pack, "pack")]),
            facts=("submodules", "pointers", DESCRIBED),
        )

    definition: dict[str, JSONValue] = {
        "kind": "git",
        "commit": source.commit,
        "origin": origin(source),
        "tells": [DESCRIBED],
        "scripts": _digest(text),
    }
    return Step("source", definition, prepare, source.commit[:12])


def repository_step() -> Step:
    """The step that makes git objects of a source, once for all tasks over it."""
    text = script("repository")
    definition: dict[str, JSONValue] = {"kind": "repository", "scripts": _digest(text)}
    return Step("repository", definition, lambda _: Work((Command("repository", text),)))


def install_step(recipe: Recipe, interpreter: Interpreter | None, described: str) -> Step:
    """The step that runs the recipe's own commands.

    Args:
        recipe: the recipe.
        interpreter: the image's, or None.
        described: what git calls the source's commit, by its last tag, or "".
    """
    history = script("install_history")
    freeze = () if interpreter is None else ("freeze_uv" if _modern(interpreter) else "freeze_pip", "freeze")
    settle = script("install_settle", *freeze)
    last = described or (f"{recipe.version}-0-g0" if recipe.version else "")
    definition: dict[str, JSONValue] = {
        "kind": "install",
        "commands": list(recipe.install),
        "environment": dict(recipe.environment),
        "scripts": _digest(history + settle),
        **({"last_tag": last} if last else {}),
        **({} if recipe.network == "index" else {"network": recipe.network}),
        **_pinned(recipe, "install"),
    }

    def prepare(_: Path) -> Work:
        commands = (Command("history", history), *map(Command.given, recipe.install), Command("install", settle))
        facts = () if interpreter is None else (INSTALLED,)
        variables = {"LAST_TAG": last, **dict(recipe.environment)}
        work = _networked(Work(commands, environment=variables, facts=facts), recipe, "install")
        return replace(work, network=StepNetwork(recipe.network))

    return Step("install", definition, prepare, "; ".join(recipe.install))


def task_step(recipe: Recipe, source: Callable[[], tuple[Path, ...]]) -> Step:
    """The step that makes what an agent gets: patch applied, hidden files gone, one commit.

    Args:
        recipe: the recipe.
        source: returns the host directories, each over the one before it, with the source as it was unpacked.
    """
    text = script("task")
    definition: dict[str, JSONValue] = {
        "kind": "task",
        "patch": recipe.patch,
        "hidden": sorted(recipe.hidden),
        "scripts": _digest(text),
    }

    def prepare(_: Path) -> Work:
        work = _patching(Command("task", text), recipe.patch, recipe.hidden, "the patch")
        *below, top = source()
        mount = Mount(top, MOUNTS / "source", below=tuple(below))
        return replace(work, mounts=(mount,), facts=("commit",))

    return Step("task", definition, prepare)


def tests_step(recipe: Recipe) -> Step:
    """The step that makes the tests layer."""
    text = script("tests")
    definition: dict[str, JSONValue] = {
        "kind": "tests",
        "test_patch": recipe.test_patch,
        "hidden": sorted(recipe.hidden),
        "scripts": _digest(text),
    }

    def prepare(_: Path) -> Work:
        return _patching(Command("tests", text), recipe.test_patch, recipe.hidden, "the test patch")

    return Step("tests", definition, prepare)


def sdist_step(source: SdistSource, store: Store) -> Step:
    """The step that puts an archive at ``/testbed``.

    Args:
        source: which one.
        store: where downloads are kept.
    """
    text = script("source_archive", "source_check")

    def prepare(_: Path) -> Work:
        archive = fetch_sdist(source, store)
        return Work((Command("source", text),), environment={"STRIP": "1"}, mounts=mount_points([(archive, "archive")]))

    definition: dict[str, JSONValue] = {"kind": "sdist", "sha256": source.sha256, "scripts": _digest(text)}
    return Step("source", definition, prepare, f"{source.name} {source.version}")


def local_step(source: LocalSource, snapshot: Snapshot) -> Step:
    """The step that puts a directory of this machine at ``/testbed``.

    Args:
        source: which one.
        snapshot: its files.
    """
    text = script("source_archive", "source_check")

    def prepare(staging: Path) -> Work:
        archive = staging / "local.tar"
        with store_faults(f"pack {snapshot.root}"):
            snapshot.write_archive(archive)
        return Work((Command("source", text),), environment={"STRIP": "0"}, mounts=mount_points([(archive, "archive")]))

    definition: dict[str, JSONValue] = {"kind": "local", "files": snapshot.digest, "scripts": _digest(text)}
    return Step("source", definition, prepare, str(source.path))


def _networked(work: Work, recipe: Recipe, step: str) -> Work:
    """The same work with the package index, as the recipe pins it, and uv."""
    return replace(
        work,
        mounts=(*work.mounts, *mount_points([(find_uv(), "uv")])),
        network=StepNetwork.INDEX,
        before=parse_moment(recipe.exclude_newer) if recipe.exclude_newer and recipe.lock is None else None,
        only=_locked(recipe, step),
        torch_backend="" if step == "python" else recipe.torch_backend,
    )


def _pinned(recipe: Recipe, step: str) -> dict[str, JSONValue]:
    """What decides which files of the package index a step sees."""
    backend: dict[str, JSONValue] = {BACKEND: recipe.torch_backend} if recipe.torch_backend and step != "python" else {}
    if (locked := _locked(recipe, step)) is not None:
        return backend | {"locked": _digest("\n".join(f"{one.file} {one.sha256}" for one in sorted(locked)))}
    return backend | ({"exclude_newer": recipe.exclude_newer} if recipe.exclude_newer else {})


def _without_cuda(recipe: Recipe) -> Recipe:
    """The same recipe with requirements as its backend for PyTorch has them; where they bring none, without one."""
    if not recipe.torch_backend:
        return recipe
    if names_torch(recipe.requirements + recipe.overrides):
        fewer = without_cuda(recipe.requirements), without_cuda(recipe.overrides)
        return replace(recipe, requirements=fewer[0], overrides=fewer[1])
    return replace(recipe, torch_backend="") if recipe.complete else recipe


def _locked(recipe: Recipe, step: str) -> tuple[Package, ...] | None:
    return None if recipe.lock is None else tuple(recipe.lock.steps.get(step, ()))


def _modern(interpreter: Interpreter) -> bool:
    """Whether uv installs for it."""
    return tuple(map(int, interpreter.minor.split("."))) >= UV_MINIMUM


def _importable(interpreter: Interpreter) -> tuple[str, ...]:
    """Which of the modules that depend on host libraries the original has: the copy must have them too."""
    code = (
        "import sys\nfor name in sys.argv[1:]:\n try:\n  __import__(name)\n  print(name)\n except Exception:\n  pass\n"
    )
    command = [str(interpreter.executable), "-E", "-s", "-c", code, *_MODULES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(name for name in done.stdout.split() if name in _MODULES)


def _patching(command: Command, patch: str, hidden: Sequence[str], name: str) -> Work:
    """Work on a patch and on hidden files: what it reads of them, and what errors say of the patch."""
    files = [("hidden", _list(hidden)), ("touched", _list(touched_files(patch)))]
    if patch.strip():
        files.append(("patch", patch.encode("utf-8", "surrogateescape")))
    note = explain_line_endings(parse_patch(patch)) or ""
    return Work((command,), files=tuple(files), patch=name, patch_note=note)


def _list(paths: Sequence[str]) -> bytes:
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in sorted(paths))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
