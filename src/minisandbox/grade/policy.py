"""Decide which files of a submission grading does not apply, because they could change how it is tested.

Sources: public reports of reward hacking (SWE-bench #465, #601, #631; BenchJack, arXiv 2605.12673), and the paths where
pytest and Python look for code and configuration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from minisandbox.patches import FileChange, FileStatus, leads_inside, touched_files
from minisandbox.spec import PythonRecipe
from minisandbox.tasks import Task
from minisandbox.values import WORKDIR

_CONFIGURATION = frozenset(
    {
        "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
        ".coveragerc",
    }
)  # fmt: skip
_START_UP = frozenset({"sitecustomize", "usercustomize"})
_COMPILED = (".pyc", ".pyo", ".pyd", ".so")
_RUNNER = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "py", "unittest", "coverage", "xdist"})
# Modules that pytest imports: a new module with such a name would run before the plugin.
_RUNNER_IMPORTS = frozenset(
    {
        "atomicwrites", "attr", "colorama", "exceptiongroup", "funcsigs", "importlib_metadata", "more_itertools",
        "packaging", "pathlib2", "pygments", "six", "toml", "tomli", "typing_extensions", "wcwidth", "zipp",
    }
)  # fmt: skip
# Before Python 3.12, copy and pickle try to import Jython's package "org", so a module of this name would run.
_OPTIONAL_IMPORTS = frozenset({"org"})
_PYTHON_2 = (
    "BaseHTTPServer Bastion CGIHTTPServer ConfigParser Cookie DocXMLRPCServer HTMLParser MimeWriter Queue "
    "SimpleHTTPServer SimpleXMLRPCServer SocketServer StringIO UserDict UserList UserString _LWPCookieJar "
    "_MozillaCookieJar __builtin__ _abcoll _hotshot anydbm audiodev bsddb cPickle cStringIO commands compiler "
    "cookielib copy_reg dbhash dircache dumbdbm dummy_thread exceptions fpformat future_builtins hotshot "
    "htmlentitydefs htmllib httplib ihooks imputil linuxaudiodev markupbase md5 mhlib mimetools mimify multifile "
    "mutex new os2emxpath popen2 posixfile repr rexec rfc822 robotparser sets sgmllib sha sre statvfs stringold "
    "strop sunaudio thread toaiff urllib2 urlparse user whichdb xmllib xmlrpclib"
)
_PYTHON_3_12 = (
    "aifc audioop cgi cgitb chunk crypt imghdr mailcap msilib nis nntplib ossaudiodev pipes sndhdr spwd sunau "
    "telnetlib uu xdrlib"
)
_PYTHON_3_13 = (
    "_android_support _colorize _interpchannels _interpqueues _interpreters _ios_support _opcode_metadata _pyrepl "
    "_suggestions _sysconfig"
)
_PYTHON_3_14 = "_ast_unparse _hmac _py_warnings _remote_debugging _types _zstd annotationlib compression"
_NEWER = (((3, 12), "_pydatetime _pylong _sha2 _wmi"), ((3, 13), _PYTHON_3_13), ((3, 14), _PYTHON_3_14))
"""Modules of the standard library by the version that added them; the host's Python may be older."""
_FORMER = (
    ((2, 7), _PYTHON_2),
    ((3, 7), "macpath macurl2path"),
    ((3, 8), "_dummy_thread dummy_threading"),
    ((3, 9), "_bootlocale formatter parser symbol"),
    ((3, 10), "binhex"),
    ((3, 11), "asynchat asyncore distutils imp smtpd"),
    ((3, 12), _PYTHON_3_12),
)
"""Modules that the standard library no longer has, by the last version that had them."""
_VERSION = re.compile(r"\D*(\d)\.(\d+)")
_DOCUMENTS = (".md", ".rst")
_DOCUMENT_NAMES = frozenset({"AUTHORS", "CHANGELOG", "CHANGES", "COPYING", "HISTORY", "LICENSE", "NEWS", "README"})
# The paths of a repository's own test runner. A submission may change the paths that the reference changes.
_OWN_RUNNERS = {
    "django/django": ("django/test/", "tests/runtests.py"),
    "sympy/sympy": ("bin/", "sympy/testing/", "sympy/utilities/pytest.py", "sympy/utilities/runtests.py"),
}
_TEST_DIRECTORIES = frozenset({"test", "tests"})
_IMPORT_ROOTS = frozenset({"", "src", "lib"})
_NEW = frozenset({FileStatus.ADDED, FileStatus.RENAMED, FileStatus.COPIED})


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that decide which files of a submission are not applied.

    Attributes:
        test_files: files that contain the task's tests.
        test_directories: directories named ``test`` or ``tests`` with such files; helpers in them count as tests.
        allowed: files that the reference changes, so a solution may change them, too.
        allowed_names: modules that the reference changes although parts of the runner have the same name.
        roots: directories from which tests import modules.
        runner: files and directories of the repository's own test runner.
        library: modules of the standard library that the tests run with.
        elsewhere: ``ROOT/NAME`` for each name that hidden tests import and that is not a module in the directory ROOT.
            For a ROOT that is a package, ``ROOT/__init__``: if a submission deleted this file, tests would import
            modules from the directory.
    """

    test_files: frozenset[str]
    test_directories: frozenset[str]
    allowed: frozenset[str]
    allowed_names: frozenset[str]
    roots: frozenset[str]
    runner: tuple[str, ...] = ()
    library: frozenset[str] = sys.stdlib_module_names
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def for_task(
        cls, task: Task, environment: Mapping[str, str] | None = None, workdir: PurePosixPath = WORKDIR
    ) -> Policy:
        """Return a task's policy, which depends only on the task's tests, its reference and its image's variables.

        Args:
            task: the task.
            environment: the variables of the task's image; None for those of the task's build.
            workdir: the directory of the repository.
        """
        variables = dict(task.build.environment) if environment is None else environment
        files = frozenset(task.test_files)
        parents = {parent for file in files for parent in _parents(file)}
        roots = import_roots(variables, workdir) | parents
        touched = frozenset(touched_files(task.patch))
        names = (_runner_name(path, roots) for path in touched)
        directories = frozenset(top for file in files if (top := _test_directory(file)) is not None)
        runners = _OWN_RUNNERS.get(task.repo, ()) if task.grader.reporter == "unittest" else ()
        runner = tuple(prefix for prefix in runners if not any(path.startswith(prefix) for path in touched))
        allowed_names = frozenset(name for name in names if name is not None)
        python = task.build.python if isinstance(task.build, PythonRecipe) else None
        return cls(files, directories, touched, allowed_names, roots, runner, _library(python))

    def why_protected(self, change: FileChange) -> str | None:
        """Return why a file of a submission is not applied, or None if it is applied.

        Args:
            change: the change of the file; both paths of a rename or copy are judged.

        Returns:
            ``test_file``, ``test_directory``, ``pytest_config``, ``start_up_hook``, ``compiled_code``,
            ``package_metadata``, ``shadows_runner``, ``shadows_import``, ``test_runner``, ``git_metadata``,
            ``link_outside`` or None.
        """
        if change.link is not None and not leads_inside(change.path, change.link):
            return "link_outside"
        for path in dict.fromkeys((change.path, change.old_path)):
            kind = None if path in self.allowed else self._kind(path, change.status)
            if kind is None and change.link is not None and path not in self.allowed:
                kind = self._link_kind(path)
            if kind is not None:
                return kind
        return None

    def _link_kind(self, path: str) -> str | None:
        """Judge a symbolic link as if its target were a directory from which modules are imported."""
        if any(root == path or root.startswith(path + "/") for root in self.roots):
            return "shadows_import"
        return self._kind(path + "/__init__.py", FileStatus.ADDED)

    def is_beside_the_point(self, path: str) -> bool:
        """Return whether a file cannot affect the tests: a test or a document that the reference does not touch."""
        *folders, name = path.split("/")
        is_test = "tests" in folders or (name.endswith(".py") and (name.startswith("test_") or name == "tests.py"))
        is_document = name.endswith(_DOCUMENTS) or name.partition(".")[0] in _DOCUMENT_NAMES
        return path not in self.allowed and (is_test or is_document)

    def _kind(self, path: str, status: FileStatus) -> str | None:
        if path in self.test_files or any(file.startswith(path + "/") for file in self.test_files):
            return "test_file"
        if any(path == directory or path.startswith(directory + "/") for directory in self.test_directories):
            return "test_directory"
        if path.startswith(self.runner) and self.runner:
            return "test_runner"
        if (kind := _kind_by_name(path)) is not None:
            return kind
        if self._shadows(path, is_new=status in _NEW):
            return "shadows_runner"
        return "shadows_import" if status is not FileStatus.MODIFIED and self._is_elsewhere(path) else None

    def _shadows(self, path: str, *, is_new: bool) -> bool:
        runner = _runner_name(path, self.roots)
        if runner is not None:
            return runner not in self.allowed_names
        shadows_library = (
            _new_module(path, frozenset({""})) in self.library
            or path.split("/", maxsplit=1)[0].removesuffix(".py") in _OPTIONAL_IMPORTS
            or _new_module(path, self.roots) in _RUNNER_IMPORTS
        )
        return is_new and shadows_library

    def _is_elsewhere(self, path: str) -> bool:
        """Return whether a file would shadow a module that tests import from outside of the repository."""
        names = top_names(path, self.roots) if self.elsewhere and path.endswith(".py") else ()
        return any(f"{root}/{name}" in self.elsewhere for root, name, _ in names)


def top_names(path: str, roots: frozenset[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield each import root above a file, the name that is imported from it, and whether this name is a module.

    The roots come in order of depth. The path is not split below the deepest root, because a submission's paths may be
    arbitrarily deep.
    """
    depth = _depth(roots)
    parts = path.split("/", depth + 1)
    for level, part in enumerate(parts[: depth + 1]):
        root = "/".join(parts[:level])
        if root in roots:
            is_module = level == len(parts) - 1 and part.endswith(".py")
            yield root, part.removesuffix(".py") if is_module else part, is_module


@lru_cache(maxsize=16)
def _depth(roots: frozenset[str]) -> int:
    """Return the number of path components of the deepest root."""
    return max((root.count("/") + 1 for root in roots if root), default=0)


def import_roots(environment: Mapping[str, str], workdir: PurePosixPath) -> frozenset[str]:
    """Return the directories from which modules are imported, by convention or because of PYTHONPATH."""
    paths = map(PurePosixPath, environment.get("PYTHONPATH", "").split(":"))
    named_roots = {str(path.relative_to(workdir)) for path in paths if path.is_relative_to(workdir)}
    return _IMPORT_ROOTS | (named_roots - {"."})


def _kind_by_name(path: str) -> str | None:
    """Return why a path is protected in every directory, or None if it is not."""
    names = path.split("/")
    name = names[-1]
    kinds = {
        "pytest_config": name == "conftest.py" or name in _CONFIGURATION,
        # sitecustomize and usercustomize may be modules or packages
        "start_up_hook": name.endswith(".pth") or any(entry.partition(".")[0] in _START_UP for entry in names),
        "compiled_code": name.endswith(_COMPILED) or "__pycache__" in names,
        # importlib.metadata reads entry points (pytest's plugins) from these directories, ignoring case
        "package_metadata": any(entry.lower().endswith((".egg-info", ".dist-info")) for entry in names),
        "git_metadata": any(entry.startswith(".git") for entry in names),
    }
    return next((kind for kind, holds in kinds.items() if holds), None)


def _parents(path: str) -> Iterable[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _test_directory(file: str) -> str | None:
    """Return the topmost directory above a test file that is named ``test`` or ``tests``, or None."""
    folders = file.split("/")[:-1]
    for depth, folder in enumerate(folders, start=1):
        if folder in _TEST_DIRECTORIES:
            return "/".join(folders[:depth])
    return None


def _runner_name(path: str, roots: frozenset[str]) -> str | None:
    """Return ``ROOT/NAME`` if a path would shadow a part of the test runner, or None."""
    for root, name, is_module in top_names(path, roots):
        if name in _RUNNER and (is_module or path != f"{root}/{name}".lstrip("/")):
            return f"{root}/{name}"
    return None


def _library(python: str | None) -> frozenset[str]:
    """Return the modules in the standard libraries of an interpreter and of the host's Python."""
    version = _VERSION.match(python or "")
    release = (int(version[1]), int(version[2])) if version else sys.version_info[:2]
    former = [names for last_version, names in _FORMER if release <= last_version]
    newer = [names for first_version, names in _NEWER if release >= first_version]
    return sys.stdlib_module_names.union(*(names.split() for names in (*former, *newer)))


def _new_module(path: str, roots: frozenset[str]) -> str | None:
    """Return the top-level module that a file makes importable from one of the given directories, or None."""
    stem = path.removesuffix("/__init__.py").removesuffix(".py")
    root, _, name = stem.rpartition("/")
    return name if stem != path and root in roots else None
