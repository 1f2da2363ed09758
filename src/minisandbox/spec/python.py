"""Recipes of Python projects, as rows of Python data sets state them."""

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
from minisandbox.types import WORKDIR


@dataclass(frozen=True, slots=True)
class PythonRecipe:
    """How to make an image of a Python project. See :func:`minisandbox.images.build`, which checks the fields.

    Attributes:
        python: ``"3.11"``, ``"3.11.7"`` or ``">=3.11,<3.15"``; None for no interpreter beyond the host's ``/usr``.
        requirements: pinned packages, installed before the source is there, so that images share them.
        complete: whether ``requirements`` name everything, as ``pip freeze`` does: nothing else is installed with them,
            and nobody asks whether they go together.
        overrides: packages installed after the requirements, in a run of their own: they win over them.
        source: what lies at ``/testbed``; None for an image without a repository.
        install: shell commands, run at ``/testbed``.
        environment: further variables, for the install commands and for everything that runs in the image.
        patch: applied to the source after it was installed and before anything is committed.
        hidden: paths in the repository that are removed from it, and kept in the tests layer.
        test_patch: the hidden tests' patch; only the tests layer gets it.
        step_timeout: seconds one build step may take; listing and hashing its files may take as long, a minute at
            least.
        network: what the install commands reach: ``"off"``, ``"index"`` (the package index) or ``"host"``.
        exclude_newer: a date such as ``"2024-03-01"``: packages uploaded later are not there; "" for all.
        system: packages of the host's distribution, installed below everything else; takes root.
        lock: the exact files of an image that is to be made again; None to let the index decide.
        version: the project's version, for build tools that ask git for one where the source's own tags do not say; ""
            for none.
        torch_backend: ``"cpu"``: PyTorch's builds without CUDA and none of CUDA's libraries, whatever the requirements
            say; "" for those that the requirements name.
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
        """Return the base and the steps.

        Raises:
            InvalidValue: a field cannot be used.
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
