"""From a recipe to the chain of its steps: every step with its key, known before anything is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.images.anchors import Anchors
from minisandbox.images.base import Entry, base_entries, base_key, platform_key
from minisandbox.images.image import DEFAULT_PATH, inside_layer
from minisandbox.images.interpreters import find_interpreter
from minisandbox.images.kept import kept_step, read_kept
from minisandbox.images.localsource import Snapshot, take_snapshot
from minisandbox.images.mirrors import Mirrors
from minisandbox.images.probe import Interpreter
from minisandbox.images.recipe import GitSource, LocalSource, Recipe, SdistSource, Source
from minisandbox.images.stepping import Step
from minisandbox.images.steps import (
    DESCRIBED,
    ENVIRONMENT,
    git_step,
    install_step,
    local_step,
    python_step,
    repository_step,
    requirements_step,
    sdist_step,
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
        anchor: the source whose tree it makes for others of its repository too; None for every other step.
    """

    step: Step
    key: str
    below: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    timeout: float
    anchor: GitSource | None = None


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
        content: the hash of everything that decides what is in it, however that is stored.
    """

    name: str
    recipe: Recipe
    base: str
    steps: tuple[PlannedStep, ...]
    tests: PlannedStep | None
    environment: tuple[tuple[str, str], ...]
    content: str

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
        anchors: which commits the others of their repositories are stored over.
    """

    store: Store
    mirrors: Path | None = None
    anchors: Anchors = field(init=False)
    _entries: tuple[Entry, ...] | None = None
    _platform: str | None = None
    _interpreters: dict[str, Interpreter] = field(default_factory=dict)
    _snapshots: dict[LocalSource, Snapshot] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Take the store's anchors."""
        self.anchors = Anchors(self.store)

    def base(self) -> tuple[Entry, ...]:
        """Return what the base layer holds."""
        with self._lock:
            if self._entries is None:
                with store_faults("read the host's /etc"):
                    self._entries = base_entries()
            return self._entries

    def platform(self) -> str:
        """Return the key that the first step's key is made from."""
        with self._lock:
            if self._platform is None:
                with store_faults("read the host's os-release"):
                    self._platform = platform_key()
            return self._platform

    def interpreter(self, text: str) -> Interpreter:
        """Return the interpreter for a request.

        Raises:
            InterpreterNotFound: this machine has none.
        """
        with self._lock:
            if text not in self._interpreters:
                self._interpreters[text] = find_interpreter(text)
            return self._interpreters[text]

    def snapshot(self, source: LocalSource) -> Snapshot:
        """Return the files of a local source, listed and hashed when it is first asked for.

        Raises:
            SourceError: it cannot be read.
            ProgramNotFound: it lies in a git work tree, and there is no git.
        """
        with self._lock:
            if source not in self._snapshots:
                self._snapshots[source] = take_snapshot(source)
            return self._snapshots[source]

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
        chain = _Chain(name, base_key(self.base()), self.platform(), environment, recipe.step_timeout, kept)
        chain.add_kept()
        if recipe.system:
            chain.add(system_step(recipe))
        if interpreter is not None:
            chain.add(python_step(interpreter, recipe))
            if recipe.requirements or recipe.overrides:
                chain.add(requirements_step(recipe, interpreter))
        tests = self._add_repository(chain, recipe, interpreter) if recipe.source is not None else None
        merged = tuple(sorted({**dict(environment), **dict(recipe.environment)}.items()))
        return Plan(name, recipe, chain.base, tuple(chain.steps), tests, merged, chain.known)

    def _add_repository(self, chain: _Chain, recipe: Recipe, interpreter: Interpreter | None) -> PlannedStep | None:
        """Add source, install and task; return the step of the tests layer, if there is one."""
        assert recipe.source is not None
        sources = self._add_source(chain, recipe.source, recipe.step_timeout)
        if recipe.install:
            chain.add(install_step(recipe, interpreter, self._described(recipe.source, sources[-1].key)))
        tests = chain.planned(tests_step(recipe)) if recipe.hidden or recipe.test_patch.strip() else None
        chain.add_task(task_step(recipe, self._trees_of([one.key for one in sources])), sources[0])
        return tests

    def _add_source(self, chain: _Chain, source: Source, timeout: float) -> list[PlannedStep]:
        """Add the source; return the steps that make its layers, bottom first."""
        if isinstance(source, LocalSource):
            return [chain.add(local_step(source, self.snapshot(source)))]
        if isinstance(source, SdistSource):
            return [chain.add(sdist_step(source, self.store))]
        mirrors = Mirrors(self.store, self.mirrors)

        def whole(one: GitSource) -> Step:
            return git_step(one, mirrors, timeout, on_made=lambda: self.anchors.record(one))

        def is_there(one: GitSource) -> bool:
            return self.store.has_layer(step_key(chain.platform, whole(one).definition))

        with self._lock:
            anchor = source if is_there(source) else self.anchors.choose(source, is_there)
        later = () if anchor == source else (git_step(source, mirrors, timeout),)
        return chain.add_apart((whole(anchor), *later), anchor)

    def _trees_of(self, keys: Sequence[str]) -> Callable[[], tuple[Path, ...]]:
        return lambda: tuple(inside_layer(self.store, key, "testbed") for key in keys)

    def _described(self, source: Source, key: str) -> str:
        """What git calls a source's commit: as its layer says; before that is made, as the repositories here do."""
        if not isinstance(source, GitSource):
            return ""
        if self.store.has_layer(key):
            return self.store.layer(key).facts.get(DESCRIBED, "")
        return Mirrors(self.store, self.mirrors).describe(source)


@dataclass(slots=True)
class _Chain:
    name: str
    base: str
    platform: str
    environment: tuple[tuple[str, str], ...]
    timeout: float
    kept: Mapping[str, str]
    steps: list[PlannedStep] = field(default_factory=list)
    known: str = field(init=False)  # what the next step's key depends on: everything below, however it is stored

    def __post_init__(self) -> None:
        self.known = self.platform

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.base, *(planned.key for planned in self.steps))

    def add(self, step: Step) -> PlannedStep:
        planned = self.planned(step)
        self.steps.append(planned)
        self.known = planned.key
        self.add_kept()
        return planned

    def add_apart(self, steps: Sequence[Step], anchor: GitSource) -> list[PlannedStep]:
        """Add steps that need nothing of the chain, each made over the one before it; return them at their places.

        What comes above is keyed by what the last one makes, not by what it is stored over.
        """
        below: tuple[str, ...] = (self.base,)
        added: list[PlannedStep] = []
        for step in steps:
            first = None if added else anchor
            key = step_key(added[-1].key if added else self.platform, step.definition)
            added.append(PlannedStep(step, key, below, self.environment, self.timeout, first))
            below = (*below, key)
        self.steps += added
        self.known = step_key(self.known, steps[-1].definition)
        self.add_kept()
        return added

    def add_task(self, step: Step, source: PlannedStep) -> None:
        """Add the task, over the repository of a source that others have in common.

        Its layer hides what it does not need of that very repository, so the key of the layer depends on both.
        """
        objects = repository_step()
        below = (*source.below, source.key)
        repository = step_key(source.key, objects.definition)
        self.steps.append(PlannedStep(objects, repository, below, self.environment, self.timeout))
        key = step_key(step_key(self.known, {"repository": repository}), step.definition)
        self.steps.append(PlannedStep(step, key, self.layers, self.environment, self.timeout))
        self.known = step_key(self.known, step.definition)
        self.add_kept()

    def add_kept(self) -> None:
        """Add what was made by hand over the last step."""
        if (layer := self.kept.get(self.layers[-1])) is not None:
            step = kept_step(self.name, layer)
            self.steps.append(PlannedStep(step, layer, self.layers, self.environment, self.timeout))
            self.known = layer
            self.add_kept()

    def planned(self, step: Step) -> PlannedStep:
        """A step over those so far, without adding it."""
        key = step_key(self.known, step.definition)
        return PlannedStep(step, key, self.layers, self.environment, self.timeout)


def _captured(interpreter: Interpreter | None) -> Mapping[str, str]:
    """The variables that everything in the image sees, besides the recipe's own.

    Steps that images share must not see those: they are no part of their keys.
    """
    variables = {"LANG": "C.UTF-8", "PATH": DEFAULT_PATH}
    if interpreter is not None:
        variables["PATH"] = f"{ENVIRONMENT}/bin:{DEFAULT_PATH}"
        variables |= {"CONDA_PREFIX": ENVIRONMENT, "CONDA_DEFAULT_ENV": ENVIRONMENT.rpartition("/")[2]}
    return variables
