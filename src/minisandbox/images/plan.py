"""From a recipe to the chain of its steps: every step with its key, known before anything is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.images.base import Entry, base_entries, base_key
from minisandbox.images.image import DEFAULT_PATH, inside_layer
from minisandbox.images.interpreters import find_interpreter
from minisandbox.images.kept import kept_step, read_kept
from minisandbox.images.probe import Interpreter
from minisandbox.images.recipe import Recipe
from minisandbox.images.stepping import Step
from minisandbox.images.steps import (
    DESCRIBED,
    ENVIRONMENT,
    install_step,
    python_step,
    requirements_step,
    source_step,
    task_step,
    tests_step,
)
from minisandbox.images.system import system_step
from minisandbox.store import Store, step_key
from minisandbox.store.faults import store_faults
from minisandbox.store.store import check_name


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step at its place in a chain.

    Attributes:
        step: what it does.
        key: the key of the layer that it makes.
        below: the keys of the layers that it is made over, bottom first.
        environment: the captured variables that it sees.
        timeout: seconds that it may take.
    """

    step: Step
    key: str
    below: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is to be made for one image.

    Attributes:
        name: what the image is called.
        recipe: what it is made from.
        base: the key of the bottom layer.
        steps: the steps above it, bottom first.
        tests: the step that makes the layer of hidden tests, or None.
        environment: the variables that everything in the image sees.
    """

    name: str
    recipe: Recipe
    base: str
    steps: tuple[PlannedStep, ...]
    tests: PlannedStep | None
    environment: tuple[tuple[str, str], ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The keys of the image's layers, bottom first."""
        return (self.base, *(planned.key for planned in self.steps))

    def all_steps(self) -> Iterator[PlannedStep]:
        """Yield every step in an order in which they can be made."""
        # the tests come before the task, as nothing needs them, and a hidden file that is not there costs less then
        for planned in self.steps:
            if planned.step.name == "task" and self.tests is not None:
                yield self.tests
            yield planned


@dataclass(slots=True)
class Planner:
    """Plans images; what many have in common is looked at once.

    Attributes:
        store: where the layers are or will be.
        mirrors: a directory of git repositories that are looked in before the network is.
    """

    store: Store
    mirrors: Path | None = None
    _entries: tuple[Entry, ...] | None = None
    _interpreters: dict[str, Interpreter] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def base(self) -> tuple[Entry, ...]:
        """Return what the base layer holds."""
        with self._lock:
            if self._entries is None:
                with store_faults("read the host's /etc"):
                    self._entries = base_entries()
            return self._entries

    def interpreter(self, text: str) -> Interpreter:
        """Return the interpreter for a request.

        Raises:
            InterpreterNotFound: this machine has none.
        """
        with self._lock:
            if text not in self._interpreters:
                self._interpreters[text] = find_interpreter(text, self.store)
            return self._interpreters[text]

    def plan(self, name: str, recipe: Recipe) -> Plan:
        """Plan an image.

        Args:
            name: what it will be called.
            recipe: what it is made from.

        Raises:
            InvalidValue: the name cannot be used.
            InterpreterNotFound: no interpreter of this machine is what the recipe asks for.
            SourceError: a local source cannot be read.
            HostError: this machine cannot carry out a step.
        """
        check_name(name)
        interpreter = self.interpreter(recipe.python) if recipe.python is not None else None
        environment = tuple(sorted(_captured(interpreter).items()))
        kept = read_kept(self.store, name).layers
        chain = _Chain(name, base_key(self.base()), environment, recipe.step_timeout, kept)
        chain.add_kept()
        if recipe.system:
            chain.add(system_step(recipe))
        if interpreter is not None:
            chain.add(python_step(interpreter, recipe))
            if recipe.requirements or recipe.overrides:
                chain.add(requirements_step(recipe, interpreter))
        tests = self._add_repository(chain, recipe, interpreter) if recipe.source is not None else None
        merged = tuple(sorted({**dict(environment), **dict(recipe.environment)}.items()))
        return Plan(name, recipe, chain.base, tuple(chain.steps), tests, merged)

    def _add_repository(self, chain: _Chain, recipe: Recipe, interpreter: Interpreter | None) -> PlannedStep | None:
        """Add source, install and task; return the step of the tests layer, if there is one."""
        assert recipe.source is not None
        source = chain.add(source_step(recipe.source, self.store, recipe.step_timeout, self.mirrors))
        if recipe.install:
            chain.add(install_step(recipe, interpreter, self._described(source.key)))
        tests = chain.planned(tests_step(recipe)) if recipe.hidden or recipe.test_patch.strip() else None
        chain.add(task_step(recipe, self._tree_of(source.key)))
        return tests

    def _tree_of(self, key: str) -> Callable[[], Path]:
        return lambda: inside_layer(self.store, key, "testbed")

    def _described(self, key: str) -> Callable[[], str]:
        return lambda: self.store.layer(key).facts.get(DESCRIBED, "")


@dataclass(slots=True)
class _Chain:
    name: str
    base: str
    environment: tuple[tuple[str, str], ...]
    timeout: float
    kept: Mapping[str, str]
    steps: list[PlannedStep] = field(default_factory=list)

    def add(self, step: Step) -> PlannedStep:
        planned = self.planned(step)
        self.steps.append(planned)
        self.add_kept()
        return planned

    def add_kept(self) -> None:
        """Add what was made by hand over the last step."""
        below = (self.base, *(planned.key for planned in self.steps))
        if (layer := self.kept.get(below[-1])) is not None:
            step = kept_step(self.name, layer)
            self.steps.append(PlannedStep(step, layer, below, self.environment, self.timeout))
            self.add_kept()

    def planned(self, step: Step) -> PlannedStep:
        """A step over those so far, without adding it."""
        below = (self.base, *(planned.key for planned in self.steps))
        return PlannedStep(step, step_key(below[-1], step.definition), below, self.environment, self.timeout)


def _captured(interpreter: Interpreter | None) -> Mapping[str, str]:
    """The variables that everything in the image sees, besides the recipe's own.

    Steps that images share must not see those: they are no part of their keys.
    """
    variables = {"LANG": "C.UTF-8", "PATH": DEFAULT_PATH}
    if interpreter is not None:
        variables["PATH"] = f"{ENVIRONMENT}/bin:{DEFAULT_PATH}"
        variables |= {"CONDA_PREFIX": ENVIRONMENT, "CONDA_DEFAULT_ENV": ENVIRONMENT.rpartition("/")[2]}
    return variables
