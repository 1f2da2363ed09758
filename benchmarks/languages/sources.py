"""Source packages of Debian: fetched by apt, and made into git repositories of a base and a commit."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images.engine import run, say
from benchmarks.languages.projects import Project

_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MIRROR = "http://deb.debian.org/debian"
_SUITES = ("bookworm", "trixie")
_FILE = re.compile(r"'(?P<address>[^']+)' (?P<name>\S+) \d+ (?P<hash>SHA256:[0-9a-f]{64})")
_WHO = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "debian"), ("EMAIL", "debian@localhost"), ("DATE", "2026-01-01T00:00:00+0000"))
}


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit in a repository made for it.

    Attributes:
        base: the hash of its parent, which is checked out.
        message: what its author says of it.
        patch: what it changes, without its tests.
        test_patch: its tests.
    """

    base: str
    message: str
    patch: str
    test_patch: str


class Archive:
    """Debian's sources, by an apt with lists of its own.

    Args:
        place: where lists and packages are kept.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        for name in ("lists/partial", "cache/archives/partial", "files"):
            (place / name).mkdir(parents=True, exist_ok=True)
        lines = (f"deb-src [signed-by={_KEYS}] {_MIRROR} {suite} main\n" for suite in _SUITES)
        (place / "sources.list").write_text("".join(lines))

    def fetch(self, project: Project) -> tuple[Path, Path]:
        """Return the upstream release and Debian's part of a source package, from the cache if they are there.

        Raises:
            SystemExit: they cannot be had.
        """
        known = self._place / "files" / f"{project.package}={project.version}"
        if not known.exists():
            say(f"fetching {known.name}")
            self._download(known)
        release, series = (next(known.glob(f"*.{part}.tar.*")) for part in ("orig", "debian"))
        return release, series

    def _download(self, target: Path) -> None:
        if not any((self._place / "lists").glob("*Sources*")):
            self._apt("apt-get", "update")
        lines = self._apt("apt-get", "source", "--print-uris", target.name)
        files = {found["name"]: found for found in _FILE.finditer(lines)}
        wanted = [name for name in files if re.search(r"\.(orig|debian)\.tar\.\w+$", name)]
        if len(wanted) != 2:
            raise SystemExit(f"{target.name} has {', '.join(files) or 'no files'}, not a release and Debian's part")
        staging = target.with_name("staging")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        for name in wanted:
            self._apt(
                "/usr/lib/apt/apt-helper", "download-file", files[name]["address"], staging / name, files[name]["hash"]
            )
        staging.rename(target)

    def _apt(self, program: str, *words: str | Path) -> str:
        place = self._place
        options = {
            "Dir::Etc::sourcelist": place / "sources.list", "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": place / "lists", "Dir::Cache": place / "cache", "APT::Sandbox::User": "root",
        }  # fmt: skip
        return run(program, *(word for key, value in options.items() for word in ("-o", f"{key}={value}")), *words)


def make_repository(project: Project, patch: str, files: tuple[Path, Path], target: Path) -> Commit:
    """Make a git repository whose branch ends with a patch of a source package; its parent is checked out.

    Args:
        project: the package.
        patch: the patch, as the series calls it.
        files: the upstream release, and Debian's part.
        target: where the repository is made.

    Raises:
        SystemExit: a patch does not apply, or the series lacks it.
    """
    shutil.rmtree(target, ignore_errors=True)
    series = target.with_name("series")
    shutil.rmtree(series, ignore_errors=True)
    _unpack(files[0], target, strip=1)
    _unpack(files[1], series)
    patches = series / "debian" / "patches"
    lines = (patches / "series").read_text().splitlines()
    names = [line.split()[0] for line in lines if line.strip() and line[0] != "#"]
    if patch not in names:
        raise SystemExit(f"{project.package} {project.version} has no patch {patch}: {', '.join(names)}")
    _git(target, "init", "--quiet", "--initial-branch", "main")
    for earlier in names[: names.index(patch)]:
        _apply(patches / earlier, target)
    _commit(target, "Release with earlier patches")
    base = _git(target, "rev-parse", "HEAD").strip()
    text = (patches / patch).read_text(errors="replace")
    _apply(patches / patch, target)
    _commit(target, patch)
    shutil.rmtree(series)
    changed = _git(target, "diff", "--name-only", base, "HEAD").splitlines()
    tests = {name for name in changed if any(fnmatch.fnmatchcase(name, pattern) for pattern in project.tests)}
    rest = [name for name in changed if name not in tests]
    found = Commit(base, _message(text), _diff(target, base, rest), _diff(target, base, sorted(tests)))
    _git(target, "checkout", "--quiet", "--detach", base)
    return found


def _unpack(archive: Path, target: Path, strip: int = 0) -> None:
    target.mkdir(parents=True)
    run("tar", "-xf", archive, "-C", target, f"--strip-components={strip}", "--no-same-owner")


def _apply(patch: Path, tree: Path) -> None:
    run("patch", "--strip=1", "--batch", "--no-backup-if-mismatch", f"--directory={tree}", f"--input={patch}")


def _commit(tree: Path, message: str) -> None:
    _git(tree, "add", "--all", "--force")
    _git(tree, "commit", "--quiet", "--message", message)


def _diff(tree: Path, base: str, names: Iterable[str]) -> str:
    return _git(tree, "diff", "--no-renames", base, "HEAD", "--", *names) if names else ""


def _git(tree: Path, *words: str) -> str:
    environment = {**os.environ, **_WHO, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    return run("git", "-C", tree, *words, environment=environment)


def _message(text: str) -> str:
    """Return what stands above the first change of a patch."""
    return re.split(r"^(?:---|diff --git |Index: )", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
