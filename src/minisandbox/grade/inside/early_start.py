"""A ``sitecustomize`` that has pytest and our plugin loaded before anything of the repository can be imported.

It runs inside a sandbox, under the task's own interpreter: Python 2.7 to 3.14, standard library only. An interpreter
imports it while it starts, before it puts the current directory on ``sys.path``; a module of the repository that is
called as one that pytest looks for would otherwise run before the plugin does, and do with pytest as it likes.

Next to it lies a file, "repository": its directory and, a line each, the modules that its image has at places from which
tests import. Where pytest needs one of these, as it does in repositories of pytest's own parts, it is loaded later, as
without this module. Those that PYTHONPATH leads to are taken from there (not in Python 2).
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
    """Return the name of the module or script that an interpreter runs, and what comes after it."""
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
    """Return the plugin's name where this interpreter is to run pytest with it, and None otherwise.

    Others leave it alone: what starts pytest (tox, poetry) hands the variable on.
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
    """Finds what the image had where it was; nothing that a submission may have added, nor the tested modules."""

    def __init__(self, lines, path):
        repository, self._path = lines[0], [os.path.abspath(place) for place in path if place]
        self.outside = [place for place in self._path if _installed(place, repository)]
        self._there = dict((place, set()) for place in self._path if place not in self.outside)
        self._tested = set()
        for line in lines[1:]:
            directory, _, name = os.path.join(repository, line).rpartition(os.sep)
            self._there.get(os.path.normpath(directory), self._tested).add(name)

    def find_spec(self, name, path=None, target=None):
        if path is not None:  # of a package, which lies where it was found
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
    """Whether a place of ``sys.path`` is none of the repository's; environments may lie in that too (tox)."""
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
    if not had_arguments:  # before Python 3.8 they come later
        sys.argv = [""]
    sys.path[:] = image.outside
    sys.meta_path[:] = [image] + standard
    try:
        import runpy  # noqa: F401 - the interpreter does, for -m

        import pytest  # noqa: F401
        from _pytest import config

        for name in config.default_plugins:
            __import__("_pytest." + name)
        __import__(plugin)
    except Exception:  # it will be loaded as it would have been, and say then what is wrong
        _forget(before)
    finally:
        sys.path[:] = path
        sys.meta_path[:] = finders + [finder for finder in sys.meta_path if finder is not image and finder not in standard]
        if not had_arguments:
            del sys.argv


def _forget(before):
    """Have modules imported anew; not those of the standard library, which are the same the second time."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if not _is_within(origin, library) or "-packages" in origin:
            del sys.modules[name]


def _next():
    """Run the module that would have been imported in this one's place."""
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
