"""A ``sitecustomize`` that loads pytest and our plugin before any module of the repository can be imported.

It runs inside a sandbox, under the task's own interpreter: Python 2.7 to 3.14, standard library only. The interpreter
imports it at start-up, before the current directory is on ``sys.path``. Without it, a module of the repository with the
name of a module that pytest imports would run before the plugin, and could change pytest.

The file "repository" next to it lists the repository's directory and, one per line, the image's modules in directories
from which tests import. If pytest needs one of these modules, as in the repositories of pytest's own parts, pytest is
loaded later, as without this module. Modules on PYTHONPATH are loaded from there (not in Python 2).
"""

import os
import re
import sys

VARIABLE = "MINISANDBOX_REPORT"
HERE = os.path.dirname(os.path.abspath(__file__))
_PYTEST = ("pytest", "py.test")
_OWN_FINDERS = ("_frozen_importlib", "_frozen_importlib_external", "_distutils_hack")


def _arguments():
    with open("/proc/self/cmdline", "rb") as source:
        arguments = source.read().split(b"\0")
    return arguments if bytes is str else [argument.decode("utf-8", "replace") for argument in arguments]


def _program(arguments):
    """Return the name of the module or script that the interpreter runs, and the arguments after it."""
    at = 1
    while at < len(arguments):
        argument = arguments[at]
        if re.match("-[A-Za-z]*m$", argument):
            return arguments[at + 1] if at + 1 < len(arguments) else "", arguments[at + 2:]
        if not argument.startswith("-"):
            return os.path.basename(argument), arguments[at + 1:]
        at += 2 if argument in ("-W", "-X", "-Q") else 1
    return "", []


def _plugin():
    """Return the plugin's name if this interpreter will run pytest with it, otherwise None.

    Programs that start pytest (tox, poetry) must ignore the variable and pass it on.
    """
    if VARIABLE not in os.environ:
        return None
    arguments = _arguments()
    program, remaining = _program(arguments)
    by_coverage = program == "coverage" and any(pair == ("-m", "pytest") for pair in zip(remaining, remaining[1:]))
    if program not in _PYTEST and not by_coverage:
        return None
    named = [name for option, name in zip(arguments, arguments[1:]) if option == "-p"]
    plugins = [name for name in named if os.path.exists(os.path.join(HERE, name + ".py"))]
    return plugins[0] if plugins else None


class _OnlyOfTheImage(object):
    """Finds modules of the image, but neither those that a submission may have added nor the tested ones."""

    def __init__(self, lines, path):
        repository, self._path = lines[0], [os.path.abspath(place) for place in path if place]
        self.outside = [place for place in self._path if _installed(place, repository)]
        self._there = dict((place, set()) for place in self._path if place not in self.outside)
        self._tested = set()
        for line in lines[1:]:
            directory, _, name = os.path.join(repository, line).rpartition(os.sep)
            self._there.get(os.path.normpath(directory), self._tested).add(name)

    def find_spec(self, name, path=None, target=None):
        if path is not None:  # the standard finders search the package of a submodule
            return None
        self.find_module(name)
        if not any(name in names for names in self._there.values()):
            return None
        places = [place for place in self._path if place in self.outside or name in self._there[place]]
        return sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, places)

    def find_module(self, name, path=None):
        if name in self._tested:
            raise ImportError("%s is a module of the repository" % name)


def _is_within(path, directory):
    return (os.path.realpath(path) + os.sep).startswith(os.path.realpath(directory).rstrip(os.sep) + os.sep)


def _installed(path, repository):
    """Return whether an entry of ``sys.path`` is outside of the repository, or in an environment inside of it (tox)."""
    prefixes = [sys.prefix, sys.exec_prefix]
    inner_prefixes = [prefix for prefix in prefixes if _is_within(prefix, repository)]
    return not _is_within(path, repository) or any(_is_within(path, prefix) for prefix in inner_prefixes)


def _kind_of(finder):
    return getattr(finder if isinstance(finder, type) else type(finder), "__module__", None)


def _load(plugin):
    with open(os.path.join(HERE, "repository"), "rb") as source:
        lines = source.read().decode("utf-8", "surrogateescape" if bytes is not str else "replace").split("\n")
    before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    standard = [finder for finder in finders if _kind_of(finder) in _OWN_FINDERS]
    image = _OnlyOfTheImage(lines, path)
    had_arguments = hasattr(sys, "argv")
    if not had_arguments:  # Python before 3.8 sets sys.argv later
        sys.argv = [""]
    sys.path[:] = image.outside
    sys.meta_path[:] = [image] + standard
    try:
        import runpy  # noqa: F401 - the interpreter imports it for -m

        import pytest  # noqa: F401
        from _pytest import config

        for name in config.default_plugins:
            __import__("_pytest." + name)
        __import__(plugin)
    except Exception:  # pytest will be loaded normally, and will report the error
        _forget(before)
    finally:
        sys.path[:] = path
        sys.meta_path[:] = finders + [finder for finder in sys.meta_path if finder is not image and finder not in standard]
        if not had_arguments:
            del sys.argv


def _forget(before):
    """Let modules be imported again, except those of the standard library, which cannot differ."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if not _is_within(origin, library) or "-packages" in origin:
            del sys.modules[name]


def _next():
    """Run the ``sitecustomize`` that this one hides."""
    for directory in sys.path:
        if os.path.abspath(directory) == HERE:
            continue
        for name in ("sitecustomize.py", os.path.join("sitecustomize", "__init__.py")):
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                with open(path, "rb") as source:
                    code = compile(source.read(), path, "exec")
                exec(code, {"__name__": "sitecustomize", "__file__": path})
                return


_found = _plugin()
if _found is not None:
    _load(_found)
_next()
