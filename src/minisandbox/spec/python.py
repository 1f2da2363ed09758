"""Describe the image of a Python project by the fields that rows of Python datasets contain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from minisandbox.errors import InvalidValue
from minisandbox.spec.index import IndexView, Lock
from minisandbox.spec.recipe import (
    CheckOut,
    CutHistory,
    HiddenTests,
    HostBase,
    Install,
    InstallPython,
    InstallRequirements,
    InstallSystem,
    Recipe,
    Step,
    check_environment,
    check_network,
)  # fmt: skip
from minisandbox.spec.sources import Source
from minisandbox.values import WORKDIR


@dataclass(frozen=True, slots=True)
class PythonRecipe:
    """A recipe of an image of a Python project. :func:`minisandbox.images.build` checks the fields.

    Attributes:
        python: ``"3.11"``, ``"3.11.7"`` or ``">=3.11,<3.15"``; None for no interpreter beyond the host's ``/usr``.
        requirements: pinned packages, installed before the source is checked out, so that images share their layer.
        complete: whether ``requirements`` name every package, as ``pip freeze`` does. If so, nothing else is installed
            with them, and their compatibility is not checked.
        overrides: packages that are installed in a second run, so that they replace requirements of the same name.
        source: the source of the repository at ``/testbed``; None for an image without a repository.
        install: shell commands, run in ``/testbed``.
        environment: further variables, for the install commands and for everything that runs in the image.
        patch: a patch that is applied to the installed source before it is committed.
        hidden: paths in the repository that are removed from it and kept in the tests layer.
        test_patch: the patch of the hidden tests; only the tests layer contains it.
        step_timeout: the timeout of each build step in seconds. Listing and hashing the files of the step has the same
            timeout, but at least a minute.
        network: the network of the install commands: ``"off"``, ``"index"`` (the package index) or ``"host"``.
        exclude_newer: a date, for example ``"2024-03-01"``; packages uploaded later are invisible. "" for no limit.
        system: packages of the host's distribution, installed in the lowest step; requires root.
        lock: the lock of an earlier image whose exact files are installed again; None to let the package index decide.
        version: the project's version, for build tools that derive the version from git tags, if the source has no such
            tag; "" for none.
        torch_backend: ``"cpu"`` for PyTorch without CUDA and its libraries, even if the requirements name other builds;
            "" for the builds that the requirements name.
    """

    python: str | None = None
    requirements: tuple[str, ...] = ()
    complete: bool = False
    overrides: tuple[str, ...] = ()
    source: Source | None = None
    install: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    patch: str = ""
    hidden: tuple[str, ...] = ()
    test_patch: str = ""
    step_timeout: float = 1800.0
    network: str = "index"
    exclude_newer: str = ""
    system: tuple[str, ...] = ()
    lock: Lock | None = None
    version: str = ""
    torch_backend: str = ""

    def recipe(self) -> Recipe:
        """Return the recipe as a base and steps.

        Raises:
            InvalidValue: a field is invalid.
        """
        if self.source is None and (self.install or self.patch or self.hidden or self.test_patch):
            raise InvalidValue(
                "install commands, patches and hidden files need a source", hint="set PythonRecipe.source"
            )
        check_network(self.network)
        check_environment(dict(self.environment))
        self._index("")
        return Recipe(
            HostBase(), tuple(self._steps()), self.environment, WORKDIR, step_timeout=self.step_timeout, lock=self.lock
        )

    def _steps(self) -> Iterator[Step]:
        if self.system:
            yield InstallSystem(self.system)
        if self.python is not None:
            yield InstallPython(self.python, replace(self._index("python"), torch_backend=""))
        if self.requirements or self.overrides:
            yield InstallRequirements(self.requirements, self.complete, self.overrides, self._index("requirements"))
        if self.source is None:
            return
        yield CheckOut(self.source)
        if self.install:
            yield Install(self.install, self.environment, self.network, self.version, self._index("install"))
        if self.hidden or self.test_patch.strip():
            yield HiddenTests(self.hidden, self.test_patch)
        yield CutHistory(self.patch, self.hidden)

    def _index(self, step: str) -> IndexView:
        locked = None if self.lock is None else tuple(self.lock.steps.get(step, ()))
        return IndexView("" if self.lock else self.exclude_newer, self.torch_backend, locked)


Buildable = Recipe | PythonRecipe
