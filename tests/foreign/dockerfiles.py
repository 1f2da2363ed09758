"""Build Dockerfiles with buildah and with us, and compare file trees and configurations.

    python tests/foreign/dockerfiles.py [--cache DIR] [--storage DRIVER] [CASE ...]

Needs root, buildah and debootstrap. The two base images are made once, in the cache directory, from the packages of the
machine's own Debian mirror. A case is ``tests/dockerfiles/cases/NAME.Dockerfile``; lines of it that begin with ``#:``
are for this program:

    #: arg NAME=VALUE        a build argument
    #: target STAGE          the stage
    #: context NAME          the directory in tests/dockerfiles/contexts; common if there is none
    #: ignore PATTERN        a line of the Dockerfile's own ignore file
    #: secret ID=CONTENT     a secret
    #: tree no REASON         only configurations are compared
    #: differs-config KEY REASON  a part of the configuration that differs
    #: differs PATHS REASON  paths whose owner, mode or presence may differ, each absolute, with what is below them

``NAME.translated`` is what buildah builds where it lacks a form: 1.28 has no documents, no --parents and no --exclude.
The exit status is 0 if every case is equal, but for what it says itself.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from minisandbox.errors import MiniSandboxError
from minisandbox.images import read_dockerfile
from minisandbox.images.dockerfile.evaluation import BuildOptions
from minisandbox.images.image import Image
from minisandbox.images.oci.pull import pull
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.images.schedule import build_all
from minisandbox.store import Store

DATA = Path(__file__).resolve().parents[1] / "dockerfiles"
TOOLS = (
    "python3 python3-pip python3-venv python3-dev git curl ca-certificates gcc g++ make nodejs npm golang-go rustc "
    "cargo unzip xz-utils bzip2 patch procps"
)
# Mount points, which every sandbox has of its own; what a tool writes the time or its process id into.
NOT_COMPARED = (
    "/dev", "/proc", "/sys", "/run", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", "/var/log",
    "/var/cache/ldconfig/aux-cache", "/var/cache/debconf", "/var/lib/apt/extended_states",
    "/var/cache/apt/pkgcache.bin", "/var/cache/apt/srcpkgcache.bin", "/var/lib/systemd",
)  # fmt: skip
MADE = ("/etc", "/tmp")
"""Mount points that an image gets which has no such directories."""
KEYS = (
    "Env", "WorkingDir", "User", "Entrypoint", "Cmd", "Labels", "ExposedPorts", "Volumes", "StopSignal", "Healthcheck",
    "OnBuild", "Shell",
)  # fmt: skip
ENGINE_LABEL = "io.buildah.version"


@dataclass
class Case:
    """One Dockerfile.

    Attributes:
        name: its name.
        text: the Dockerfile.
        translated: what buildah builds.
        options: the lines that begin with ``#:``, by their first word.
    """

    name: str
    text: str
    translated: str
    options: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Case:
        """Read a case."""
        lines = path.read_text().splitlines()
        options: dict[str, list[str]] = {}
        for line in lines:
            if line.startswith("#: "):
                word, _, rest = line[3:].partition(" ")
                options.setdefault(word, []).append(rest)
        text = "".join(f"{line}\n" for line in lines if not line.startswith("#: "))
        other = path.with_suffix(".translated")
        return cls(path.stem, text, other.read_text() if other.is_file() else text, options)

    def one(self, word: str, default: str = "") -> str:
        """Return an option that occurs once at most."""
        return self.options.get(word, [default])[0]

    def differs(self) -> list[str]:
        """Return the paths that may differ."""
        words = (word for line in self.options.get("differs", ()) for word in shlex.split(line))
        return [word for word in words if word.startswith("/")]

    def pairs(self, word: str) -> dict[str, str]:
        """Return options that are names with values."""
        return dict(line.split("=", 1) for line in self.options.get(word, ()))


def cases(names: Sequence[str] = ()) -> list[Case]:
    """Return the cases, or those of these names."""
    found = [Case.read(path) for path in sorted((DATA / "cases").glob("*.Dockerfile"))]
    return [case for case in found if not names or case.name in names]


def lay_out(case: Case, place: Path) -> tuple[Path, Path]:
    """Write a case's Dockerfile and its context; returns both."""
    context, dockerfile = place / "context", place / "Dockerfile"
    kind = case.one("context", "common")
    shutil.copytree(DATA / "contexts" / kind, context, symlinks=True)
    for path in context.rglob("*"):  # whatever umask the checkout had
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    if kind == "common":
        write_archives(context)
    dockerfile.write_text(case.text)
    (place / "Dockerfile.translated").write_text(case.translated)
    if "ignore" in case.options:
        (place / "Dockerfile.dockerignore").write_text("\n".join(case.options["ignore"]) + "\n")
    return dockerfile, context


def write_archives(context: Path) -> None:
    """Write an archive in every compression: files with owners, a set-uid file, both kinds of links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, mode, owner, target in (
            ("in", tarfile.DIRTYPE, 0o750, 11, ""), ("in/f", tarfile.REGTYPE, 0o644, 12, ""),
            ("in/suid", tarfile.REGTYPE, 0o4755, 0, ""), ("in/hard", tarfile.LNKTYPE, 0o644, 12, "in/f"),
            ("in/soft", tarfile.SYMTYPE, 0o777, 13, "f"), ("implied/deep/g", tarfile.REGTYPE, 0o600, 0, ""),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid, info.linkname = kind, mode, owner, owner, target
            info.mtime, info.size = 1_700_000_000, 2 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"x\n"))
    data = out.getvalue()
    (context / "archive.tar").write_bytes(data)
    (context / "archive.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    for suffix, compress in (
        ("gz", lambda one: gzip.compress(one, mtime=0)),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
    ):
        (context / f"archive.tar.{suffix}").write_bytes(compress(data))


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """buildah with a storage of its own.

    Attributes:
        root: the directory of its storage.
        driver: how it stores layers.
    """

    root: Path
    driver: str

    def call(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run a command of it."""
        options = ("--root", f"{self.root}/root", "--runroot", f"{self.root}/run", "--storage-driver", self.driver)
        done = subprocess.run(
            ["buildah", *options, *arguments], cwd=cwd, text=True, capture_output=True, check=False, timeout=1800
        )
        if done.returncode:
            raise RuntimeError(f"buildah {shlex.join(arguments)}: {done.stderr[-2000:]}")
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        """Whether there is an image."""
        return name in self.call("images", "--format", "{{.Name}}")

    def build(self, case: Case, place: Path) -> str:
        """Build a case; returns the image's name."""
        options = [word for name, value in case.pairs("arg").items() for word in ("--build-arg", f"{name}={value}")]
        for name, value in case.pairs("secret").items():
            (place / f"secret-{name}").write_text(value)
            options += ["--secret", f"id={name},src={place}/secret-{name}"]
        if target := case.one("target"):
            options += ["--target", target]
        if "ignore" in case.options:
            options += ["--ignorefile", f"{place}/Dockerfile.dockerignore"]
        name = f"case-{case.name}"
        self.call(
            "bud", "--isolation", "chroot", "--format", "docker", "--layers=false", "--pull-never", *options,
            "-f", f"{place}/Dockerfile.translated", "-t", name, f"{place}/context",
        )  # fmt: skip
        return name

    @contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        """Mount an image."""
        container = self.call("from", "--pull-never", name)
        try:
            yield Path(self.call("mount", container))
        finally:
            self.call("rm", container)

    def config(self, name: str) -> dict[str, object]:
        """Return an image's configuration."""
        found: dict[str, object] = json.loads(self.call("inspect", "--type", "image", name))["Docker"]["config"]
        return found


def make_bases(engine: Engine, cache: Path) -> None:
    """Make the base images, once."""
    if not engine.has("minibase"):
        tree = cache / "debootstrap"
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(tree)], check=True)
        subprocess.run(
            "rm -rf var/cache/apt/archives/*.deb dev/* && tar -cf ../base.tar .", shell=True, check=True, cwd=tree
        )
        container = engine.call("from", "scratch")
        engine.call("add", container, f"{cache}/base.tar", "/")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        engine.call("config", "--env", f"PATH={path}", "--cmd", "bash", container)
        engine.call("commit", "--format", "docker", container, "minibase")
        shutil.rmtree(tree)
    if not engine.has("devbase"):
        (cache / "devbase").write_text(
            "FROM minibase\nRUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "
            f"--no-install-recommends {TOOLS} && rm -rf /var/lib/apt/lists/*\n"
        )
        engine.call(
            "bud", "--isolation", "chroot", "--format", "docker", "-f", f"{cache}/devbase", "-t", "devbase", str(cache)
        )
    for name in ("minibase", "devbase"):
        if not (cache / "layout" / name).is_dir():
            (cache / "layout").mkdir(exist_ok=True)
            engine.call("push", name, f"oci:{cache}/layout/{name}:latest")


# --- the comparison ---------------------------------------------------------------------------------------------------


@contextmanager
def merged(image: Image, place: Path) -> Iterator[Path]:
    """Mount the layers of one of our images, as the kernel shows them."""
    links = place / "layers"
    links.mkdir()
    (place / "empty").mkdir()
    target = place / "merged"
    target.mkdir()
    trees = [image.store.layer_tree(key) for key in reversed(image.layers)]
    for number, tree in enumerate((*trees, place / "empty")):
        os.symlink(tree, links / str(number))
    lower = ":".join(str(number) for number in range(len(trees) + 1))
    subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", f"ro,userxattr,lowerdir={lower}", str(target)],
        check=True,
        cwd=links,
    )
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


Facts = dict[str, tuple[object, ...]]


def list_tree(root: Path) -> Facts:
    """Return what is known of every path of a tree."""
    found: Facts = {}
    waiting = [""]
    while waiting:
        path = waiting.pop()
        for name in os.listdir(f"{root}{path}"):
            inner = f"{path}/{name}"
            if inner in NOT_COMPARED or name == "__pycache__":
                continue
            info = os.lstat(f"{root}{inner}")
            found[inner] = (*_content(f"{root}{inner}", info), oct(info.st_mode), info.st_uid, info.st_gid)
            if stat.S_ISDIR(info.st_mode):
                waiting.append(inner)
    return found


def _content(path: str, info: os.stat_result) -> tuple[object, ...]:
    if stat.S_ISLNK(info.st_mode):
        return (os.readlink(path),)
    names = sorted(name for name in os.listxattr(path) if not name.startswith(("user.overlay", "trusted.")))
    attributes = tuple((name, os.getxattr(path, name)) for name in names)
    if not stat.S_ISREG(info.st_mode):
        return (attributes,)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), attributes


def compare_trees(theirs: Facts, ours: Facts, allowed: Sequence[str]) -> tuple[list[str], int]:
    """Return the differences that no limit explains, and how many one does."""
    found, explained, needed = [], 0, set()
    for path in sorted({*theirs, *ours}):
        if theirs.get(path) == ours.get(path) or (path in MADE and path not in theirs):
            continue
        limits = {one for one in allowed if path == one or path.startswith(f"{one}/")}
        if limits:
            explained += 1
            needed |= limits
        else:
            found.append(f"{path}: buildah {theirs.get(path)}, here {ours.get(path)}")
    found += [f"{one}: the documented difference is not there" for one in sorted(set(allowed) - needed)]
    return found, explained


def compare_configs(theirs: Mapping[str, object], ours: Mapping[str, object], excepted: str) -> list[str]:
    """Return the differences of two configurations."""
    one, other = (normal_config(config) for config in (theirs, ours))
    found = [key for key in KEYS if one[key] != other[key]]
    if excepted and excepted not in found:
        return [f"{excepted}: the documented difference is not there"]
    return [f"{key}: buildah {one[key]}, here {other[key]}" for key in found if key != excepted]


def normal_config(config: Mapping[str, object]) -> dict[str, object]:
    """A configuration in which what means the same is the same."""
    found = {key: config.get(key) or None for key in KEYS}
    if isinstance(found["Env"], (list, tuple)):
        found["Env"] = dict(str(row).split("=", 1) for row in found["Env"])
    labels = found["Labels"]
    if isinstance(labels, Mapping):
        found["Labels"] = {name: value for name, value in labels.items() if name != ENGINE_LABEL} or None
    for key in ("Entrypoint", "Cmd", "OnBuild", "Shell"):
        value = found[key]
        found[key] = list(value) if isinstance(value, (list, tuple)) else value
    health = found["Healthcheck"]
    if isinstance(health, Mapping):
        found["Healthcheck"] = {
            name: list(value) if isinstance(value, (list, tuple)) else value for name, value in health.items() if value
        }
    found["WorkingDir"] = str(found["WorkingDir"] or "").rstrip("/") or None
    found["User"] = found["User"] if found["User"] not in ("root", "0") else None
    found["Shell"] = found["Shell"] if found["Shell"] != ["/bin/sh", "-c"] else None
    return found


@dataclass
class Result:
    """What came of a case.

    Attributes:
        differences: those that no limit explains, or the error.
        explained: how many paths differ as the case says.
        theirs: seconds that buildah took.
        ours: seconds that we took.
        again: seconds of our second build.
        steps: steps of our second build.
    """

    differences: list[str]
    explained: int = 0
    theirs: float = 0.0
    ours: float = 0.0
    again: float = 0.0
    steps: int = 0


def build_here(
    dockerfile: Path, context: Path, store: Store, name: str, options: BuildOptions, progress: Progress | None = None
) -> Image:
    """Build a Dockerfile with us."""
    built = build_all(
        {name: lambda: read_dockerfile(dockerfile, context, store=store, options=options)},
        store=store,
        progress=progress,
    )
    for error in built.failures.values():
        raise error
    return built.images[name]


def run_case(case: Case, engine: Engine, store: Store, work: Path) -> Result:
    """Build a case twice over, and compare."""
    place = work / case.name
    place.mkdir()
    dockerfile, context = lay_out(case, place)
    options = BuildOptions(
        arguments=case.pairs("arg"), target=case.one("target") or None,
        secrets={name: value.encode() for name, value in case.pairs("secret").items()},
    )  # fmt: skip
    result = Result([])
    events: list[BuildEvent] = []
    try:
        began = time.monotonic()
        image = build_here(dockerfile, context, store, case.name, options)
        result.ours = time.monotonic() - began
        began = time.monotonic()
        build_here(dockerfile, context, store, case.name, options, events.append)
        result.again = time.monotonic() - began
        began = time.monotonic()
        name = engine.build(case, place)
        result.theirs = time.monotonic() - began
    except (MiniSandboxError, RuntimeError) as error:
        result.differences.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(place)
        return result
    result.steps = sum(event.state is StepState.FINISHED for event in events)
    if result.steps or result.again >= 1.0:
        result.differences.append(f"the second build took {result.again:.1f} s and made {result.steps} steps")
    if not case.one("tree").startswith("no"):
        with engine.mounted(name) as theirs, merged(image, place) as ours:
            found, result.explained = compare_trees(list_tree(theirs), list_tree(ours), case.differs())
        result.differences += found
    excepted = case.one("differs-config").partition(" ")[0]
    result.differences += compare_configs(engine.config(name), image.config, excepted)
    engine.call("rmi", name)
    shutil.rmtree(place)
    return result


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/minisandbox-dockerfiles")
    parser.add_argument("--storage", default="overlay", help="buildah's storage driver: overlay or vfs")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    engine = Engine(args.cache / "engine", args.storage)
    make_bases(engine, args.cache)
    shutil.rmtree(args.cache / "work", ignore_errors=True)
    (args.cache / "work").mkdir()
    store = Store.open(args.cache / "store")
    for name in ("minibase", "devbase"):
        pull(f"oci:{args.cache}/layout/{name}:latest", store=store, name=name)
    failed = []
    found = cases(args.names)
    for case in found:
        result = run_case(case, engine, store, args.cache / "work")
        word = "differs" if result.differences else "equal"
        note = f", {result.explained} paths as documented" if result.explained else ""
        print(
            f"{case.name:26} {word:8} here {result.ours:6.1f} s, again {result.again:.2f} s, buildah "
            f"{result.theirs:6.1f} s{note}", flush=True,
        )  # fmt: skip
        for line in result.differences[:20]:
            print(f"    {line}", flush=True)
        failed += [case.name] if result.differences else []
    print(f"{len(found) - len(failed)} of {len(found)} equal" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
