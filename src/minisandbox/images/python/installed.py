"""Find the Python environments of an image by reading its layers on the host, without running code of the image."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import Version

from minisandbox.errors import NotFound
from minisandbox.images.image import Image
from minisandbox.images.tree import ImageTree
from minisandbox.spec import shown
from minisandbox.store.blobs.lower_layers import LowerLayers

_MINOR = re.compile(r"python(\d\.\d{1,2})")
_RELEASE = r"(\d+\.\d+\.\d+)"
_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,200}[A-Za-z0-9])?")
_PLACES = ("/.venv", "/venv", "/opt/*", "/opt/*/envs/*")
_AT_HOME = ("*", "*/envs/*", ".pyenv/versions/*")
_HEADERS = 1 << 16
"""Maximum bytes to read of a metadata file; only the headers are needed, but a long description may follow them."""
_USUAL = "testbed"
"""Name of the conda environment that shells activate in SWE-bench's images and similar images."""


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """A Python environment of an image.

    Attributes:
        path: the environment's prefix in the image.
        python: the interpreter's version, for example ``"3.9.20"``, or ``"3.9"`` if the patch release is unknown.
        pins: the installed distributions, as ``NAME==VERSION``, sorted.
        apart: (name, reason) of the distributions that are not on any package index.
    """

    path: str
    python: str
    pins: tuple[str, ...]
    apart: tuple[tuple[str, str], ...]

    def to_yaml(self) -> str:
        """Return the pins as ``conda env export`` does, for :func:`minisandbox.images.read_pins` and ``--pins``."""
        left_out = [f"# not on a package index: {name} ({reason})" for name, reason in self.apart]
        pins = [f"    - {pin}" for pin in self.pins]
        lines = [f"# {_plain(self.path)}", *left_out, "dependencies:", f"  - python={self.python}"]
        return "\n".join([*lines, *(["  - pip:"] if pins else []), *pins, ""])


def python_environments(image: Image, *more: str) -> list[PythonEnvironment]:
    """Read the Python environments of an image.

    Args:
        image: an image of a store.
        more: further absolute paths in the image where environments may lie.

    Returns:
        First the environment that the image's commands use (by ``VIRTUAL_ENV``, ``CONDA_PREFIX`` and ``PATH``; for a
        conda installation, its environment ``testbed`` or its only environment), then environments in common places.

    Raises:
        NotFound: a layer is no longer in the store.
        StoreError: a layer is damaged.
    """
    with image.store.hold(*image.layers):
        tree = ImageTree(LowerLayers(tuple(image.store.layer_tree(key) for key in reversed(image.layers))))
        reader = _Reader(tree, dict(image.environment), image.user.partition(":")[0] or "root")
        prefixes: dict[tuple[str, ...] | None, str] = {}
        for path in (*reader.prefixes(str(image.workdir).rstrip("/")), *more):
            prefixes.setdefault(tree.resolve(path), posixpath.normpath(f"/{path.strip('/')}"))
        environments = [reader.environment(path) for resolved, path in prefixes.items() if resolved is not None]
    return [environment for environment in environments if environment is not None]


def choose(image: Image, environments: Sequence[PythonEnvironment], path: str = "") -> PythonEnvironment:
    """Choose an environment of an image by its path.

    Args:
        image: the image.
        environments: the image's environments (:func:`python_environments`).
        path: the path of the environment in the image, or the last parts of the path; "" for the first environment.

    Raises:
        NotFound: there is no such environment.
    """
    path = path.rstrip("/")
    for environment in environments:
        if path in ("", environment.path) or environment.path.endswith(f"/{path}"):
            return environment
    paths = ", ".join(environment.path for environment in environments)
    found_paths = paths or "none in its PATH and in the usual places, in layers of its own"
    label = f"Python environment {path!r}" if path else "Python environment"
    raise NotFound(f"image {image.name!r} has no {label}", reason=f"found: {found_paths}")


class _Distribution(NamedTuple):
    """A distribution, and the reason why it is not on any package index, or ""."""

    name: str
    version: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the Python environments of one image."""

    tree: ImageTree
    variables: Mapping[str, str]
    user: str

    def prefixes(self, workdir: str) -> Iterator[str]:
        """Yield the possible prefixes of environments, the most likely first."""
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if path := self.variables.get(name, ""):
                yield path.rstrip("/")
        for folder in self.variables.get("PATH", "").split(":"):
            for program in (f"{folder}/python", f"{folder}/python3"):
                if folder.startswith("/") and self.tree.has(program):
                    yield from self._with_conda(self._prefix_of(program))
        homes = [f"{self._home()}/{pattern}" for pattern in _AT_HOME]
        for pattern in (workdir or "/", f"{workdir}/.venv", f"{workdir}/venv", *_PLACES, *homes):
            yield from self._matching(pattern)
        yield from ("/usr/local", "/usr")

    def _prefix_of(self, program: str) -> str:
        """Return the prefix of an interpreter; resolve links, except those from a virtual environment to its base."""
        prefix = program.rpartition("/")[0].rpartition("/")[0]
        if self.tree.has(f"{prefix}/pyvenv.cfg"):
            return prefix
        return "".join(f"/{part}" for part in (self.tree.resolve(program) or ())[:-2]) or prefix

    def _with_conda(self, prefix: str) -> Iterator[str]:
        """Yield a prefix; for conda, the activated environment comes before the base installation."""
        names = self.tree.names(f"{prefix}/envs") if self.tree.has(f"{prefix}/conda-meta") else []
        environments = [name for name in names if self.tree.has(f"{prefix}/envs/{name}/conda-meta")]
        if _USUAL in environments or len(environments) == 1:
            yield f"{prefix}/envs/{_USUAL if _USUAL in environments else environments[0]}"
        yield prefix
        yield from (f"{prefix}/envs/{name}" for name in environments)

    def _matching(self, pattern: str) -> Iterator[str]:
        head, star, tail = pattern.partition("*")
        if not star:
            yield pattern.rstrip("/")
            return
        for name in self.tree.names(head):
            yield from self._matching(f"{head}{name}{tail}")

    def environment(self, prefix: str) -> PythonEnvironment | None:
        """Return the environment at a prefix; None if the directory is not an environment."""
        settings = dict(_settings(self.tree.read(f"{prefix}/pyvenv.cfg")))
        minor = self._minor(prefix)
        if minor is None:
            return None
        distributions: dict[str, _Distribution] = {}
        for site in dict.fromkeys(self._sites(prefix, minor, settings)):
            for name in self.tree.names(site):
                if (distribution := self._distribution(f"{site}/{name}")) is not None:
                    distributions.setdefault(canonicalize_name(distribution.name), distribution)
        ordered = [distributions[name] for name in sorted(distributions)]
        pins = tuple(
            f"{distribution.name}=={distribution.version}" for distribution in ordered if not distribution.reason
        )
        apart = tuple((distribution.name, distribution.reason) for distribution in ordered if distribution.reason)
        return PythonEnvironment(prefix or "/", self._version(prefix, minor, settings), pins, apart)

    def _minor(self, prefix: str) -> str | None:
        """Return the minor version of the Python at a prefix, from the name of its program or of its library."""
        libraries = [match[1] for name in self.tree.names(f"{prefix}/lib") if (match := _MINOR.fullmatch(name))]
        for program in ("python", "python3", "python2"):
            name = (self.tree.resolve(f"{prefix}/bin/{program}") or ("",))[-1]
            if (match := _MINOR.match(name)) and match[1] in libraries:
                return match[1]
        marks = ("pyvenv.cfg", "conda-meta", "bin/python", "bin/python3")
        return (
            libraries[0] if len(libraries) == 1 and any(self.tree.has(f"{prefix}/{mark}") for mark in marks) else None
        )

    def _version(self, prefix: str, minor: str, settings: Mapping[str, str]) -> str:
        """Return the full version from the first file that contains it, or else the minor version."""
        base = settings.get("home", f"{prefix}/bin").rpartition("/")[0]
        header = self.tree.read(f"{base}/include/python{minor}/patchlevel.h")
        header += self.tree.read(f"{base}/include/python{minor}m/patchlevel.h")
        sources = (
            (_RELEASE, settings.get("version") or settings.get("version_info", "")),
            (rf"python-{_RELEASE}-", "\n".join(self.tree.names(f"{prefix}/conda-meta"))),
            (rf'PY_VERSION\s+"{_RELEASE}', header.decode("utf-8", "replace")),
            (
                rf"(?m)^Package: python{re.escape(minor)}-minimal\n(?:.+\n)*?Version: {_RELEASE}",
                self.tree.read("/var/lib/dpkg/status").decode("utf-8", "replace") if base == "/usr" else "",
            ),
        )
        versions = (match[1] for pattern, content in sources if (match := re.search(pattern, content)))
        return next((version for version in versions if version.startswith(f"{minor}.")), minor)

    def _sites(self, prefix: str, minor: str, settings: Mapping[str, str]) -> Iterator[str]:
        """Yield the directories with distributions, in import order (CPython's site.py)."""
        system = not settings or settings.get("include-system-site-packages", "").lower() == "true"
        if system:
            yield f"{self._home()}/.local/lib/python{minor}/site-packages"
        if prefix == "/usr":  # the directories of Debian and Fedora
            yield f"/usr/local/lib/python{minor}/dist-packages"
            yield from (f"/usr/local/{lib}/python{minor}/site-packages" for lib in ("lib", "lib64"))
            yield from ("/usr/lib/python3/dist-packages", f"/usr/lib/python{minor}/dist-packages")
        yield from (f"{prefix}/{lib}/python{minor}/site-packages" for lib in ("lib", "lib64"))
        if settings and system:
            yield from self._sites(settings.get("home", "").rpartition("/")[0], minor, {})

    def _home(self) -> str:
        rows = [line.split(":") for line in self.tree.read("/etc/passwd").decode("utf-8", "replace").splitlines()]
        homes = [row[5] for row in rows if len(row) > 5 and self.user in (row[0], row[2])]
        return self.variables.get("HOME") or (homes[0] if homes else "/root")

    def _distribution(self, path: str) -> _Distribution | None:
        """Read a distribution from its metadata file or directory; None for any other path."""
        stem, _, kind = path.rpartition("/")[2].rpartition(".")
        if kind == "egg-link":
            source = self.tree.read(path).decode("utf-8", "replace").partition("\n")[0]
            reason = f"editable installation of {_plain(source)}"
            return _Distribution(stem, "", reason) if _PROJECT.fullmatch(stem) else None
        files = {"dist-info": ("/METADATA",), "egg-info": ("/PKG-INFO", ""), "egg": ("/EGG-INFO/PKG-INFO",)}
        metadata = b"".join(self.tree.read(path + name, _HEADERS) for name in files.get(kind, ()))
        fields = dict(
            re.findall(r"(?m)^(Name|Version):[ \t]*(\S+)", metadata.decode("utf-8", "replace").split("\n\n")[0])
        )
        name, version = fields.get("Name", ""), fields.get("Version", "")
        if _PROJECT.fullmatch(name) is None or stem.startswith("~"):  # leftovers of an interrupted pip
            return None
        reason = self._reason(path) or ("" if _is_version(version) else f"{_plain(version)!r} is no version")
        return _Distribution(name, version, reason)

    def _reason(self, path: str) -> str:
        """Return why a distribution is not on any package index: its recorded direct origin (PEP 610), or ""."""
        if self.tree.read(f"{path}/INSTALLER").strip() == b"conda":  # conda records its build directory
            return ""
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            origin = json.loads(self.tree.read(f"{path}/direct_url.json") or "{}")
            url = _plain(shown(str(origin["url"])))
            vcs, folder = origin.get("vcs_info"), origin.get("dir_info")
            if isinstance(vcs, dict):
                return f"installed from {url} at {_plain(str(vcs.get('commit_id')))}"
            editable = isinstance(folder, dict) and folder.get("editable") is True
            return f"editable installation of {url}" if editable else f"installed from {url}"
        return ""


def _settings(content: bytes) -> Iterator[tuple[str, str]]:
    for line in content.decode("utf-8", "replace").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip().lower(), value.strip()


def _is_version(version: str) -> bool:
    try:
        return len(version) < 200 and bool(Version(version))
    except ValueError:
        return False


def _plain(text: str) -> str:
    """Return an untrusted string as one printable line of limited length."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:300])
