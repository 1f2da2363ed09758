"""A ``sitecustomize`` that loads pytest and our plugin before any module of the repository can be imported.

It runs inside a sandbox, under the task's own interpreter: Python 2.7 to 3.14, standard library only. The interpreter
imports it at start-up, before the current directory is on ``sys.path``. Without this module, a submission could add a
module with the name of one that pytest imports; it would run before the plugin, and could change pytest.

The file "repository" next to this module contains the path of the repository and, one per line, the image's modules in
directories from which tests import. If pytest itself needs one of these modules, as in pytest's own repository, this
module does not load pytest. Modules on PYTHONPATH are loaded from there (not in Python 2).
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
    index = 1
    while index < len(arguments):
        argument = arguments[index]
        if re.match("-[A-Za-z]*m$", argument):
            return arguments[index + 1] if index + 1 < len(arguments) else "", arguments[index + 2:]
        if not argument.startswith("-"):
            return os.path.basename(argument), arguments[index + 1:]
        index += 2 if argument in ("-W", "-X", "-Q") else 1
    return "", []


def _plugin():
    """Return the plugin's name if this interpreter will run pytest with it, otherwise None.

    Programs that start pytest (tox, poetry) must ignore the variable and pass it on.
    """
    if VARIABLE not in os.environ:
        return None
    arguments = _arguments()
    program, options = _program(arguments)
    is_coverage = program == "coverage" and any(pair == ("-m", "pytest") for pair in zip(options, options[1:]))
    if program not in _PYTEST and not is_coverage:
        return None
    plugin_names = [name for option, name in zip(arguments, arguments[1:]) if option == "-p"]
    plugins = [name for name in plugin_names if os.path.exists(os.path.join(HERE, name + ".py"))]
    return plugins[0] if plugins else None


class _ImageFinder(object):
    """Finds the image's modules, but neither modules that a submission may have added nor the tested project's."""

    def __init__(self, lines, search_path):
        repository, self._path = lines[0], [os.path.abspath(entry) for entry in search_path if entry]
        self.outside = [entry for entry in self._path if _installed(entry, repository)]
        self._image_names = dict((entry, set()) for entry in self._path if entry not in self.outside)
        self._tested_names = set()
        for line in lines[1:]:
            directory, _, name = os.path.join(repository, line).rpartition(os.sep)
            self._image_names.get(os.path.normpath(directory), self._tested_names).add(name)

    def find_spec(self, name, path=None, target=None):
        if path is not None:  # leave submodules to the standard finders
            return None
        self.find_module(name)
        if not any(name in names for names in self._image_names.values()):
            return None
        entries = [entry for entry in self._path if entry in self.outside or name in self._image_names[entry]]
        return sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, entries)

    def find_module(self, name, path=None):
        if name in self._tested_names:
            raise ImportError("%s is a module of the repository" % name)


def _is_within(path, directory):
    return (os.path.realpath(path) + os.sep).startswith(os.path.realpath(directory).rstrip(os.sep) + os.sep)


def _installed(path, repository):
    """Return whether an entry of ``sys.path`` lies outside the repository or in a virtual environment in it (tox)."""
    prefixes = [sys.prefix, sys.exec_prefix]
    inner_prefixes = [prefix for prefix in prefixes if _is_within(prefix, repository)]
    return not _is_within(path, repository) or any(_is_within(path, prefix) for prefix in inner_prefixes)


def _module_of(finder):
    return getattr(finder if isinstance(finder, type) else type(finder), "__module__", None)


def _load(plugin):
    with open(os.path.join(HERE, "repository"), "rb") as source:
        lines = source.read().decode("utf-8", "surrogateescape" if bytes is not str else "replace").split("\n")
    loaded_names, search_path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    standard_finders = [finder for finder in finders if _module_of(finder) in _OWN_FINDERS]
    image_finder = _ImageFinder(lines, search_path)
    had_arguments = hasattr(sys, "argv")
    if not had_arguments:  # before Python 3.8, sys.argv is set after sitecustomize has run
        sys.argv = [""]
    sys.path[:] = image_finder.outside
    sys.meta_path[:] = [image_finder] + standard_finders
    try:
        import runpy  # noqa: F401 - the interpreter imports it for -m

        import pytest  # noqa: F401
        from _pytest import config

        for name in config.default_plugins:
            __import__("_pytest." + name)
        __import__(plugin)
    except Exception:  # pytest will be loaded again later, and will report an error then
        _forget(loaded_names)
    finally:
        sys.path[:] = search_path
        used_finders = [image_finder] + standard_finders
        sys.meta_path[:] = finders + [finder for finder in sys.meta_path if finder not in used_finders]
        if not had_arguments:
            del sys.argv


def _forget(loaded_names):
    """Unload the modules that are not in ``loaded_names``, except those of the standard library, which stay valid."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    for name in set(sys.modules) - loaded_names:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if not _is_within(origin, library) or "-packages" in origin:
            del sys.modules[name]


def _run_hidden_sitecustomize():
    """Run the image's own ``sitecustomize``, which this module hides."""
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


_plugin_name = _plugin()
if _plugin_name is not None:
    _load(_plugin_name)
_run_hidden_sitecustomize()
