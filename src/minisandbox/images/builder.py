"""From a recipe to an image: the chain of steps, each made once and then found."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.images.image import DEFAULT_PATH, WORKDIR, Image, ensure_base, image_of, inside_layer, put_if_new
from minisandbox.images.interpreters import find_interpreter
from minisandbox.images.probe import Interpreter
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.images.recipe import Recipe
from minisandbox.images.runner import Place, run_step
from minisandbox.images.steps import (
    ENVIRONMENT,
    Step,
    install_step,
    python_step,
    requirements_step,
    source_step,
    task_step,
    tests_step,
)
from minisandbox.store import ImageRecord, LayerRecord, Made, Store, step_key
from minisandbox.store.store import check_name


def build(recipe: Recipe, *, store: Store, name: str, progress: Progress | None = None) -> Image:
    """Make an image, or find it: every layer that is already in the store is used as it is.

    Args:
        recipe: what to make.
        store: where the layers go.
        name: what the image is called; an earlier image of that name is replaced.
        progress: told of each step as it starts and ends.

    Returns:
        The image.

    Raises:
        InvalidValue: the name cannot be used.
        InterpreterNotFound: no interpreter of this machine is what the recipe asks for.
        SourceError: the repository source cannot be had.
        PatchError: a patch does not apply.
        BuildError: a step failed; nothing of it was published, its log is kept.
        DiskFull: the disk is full; finished layers are kept.
        SandboxCreationError: this machine cannot make a sandbox.
    """
    check_name(name)
    interpreter = find_interpreter(recipe.python, store) if recipe.python is not None else None
    job = _Job(store, name, recipe.step_timeout, progress, dict(_captured(interpreter)))
    job.add_base()
    if interpreter is not None:
        job.add(python_step(interpreter))
        if recipe.requirements:
            job.add(requirements_step(recipe, interpreter))
    tests = _add_repository(job, recipe) if recipe.source is not None else None
    return _record(job, recipe, tests)


def _add_repository(job: _Job, recipe: Recipe) -> str | None:
    """Add source, install and task layers; return the key of the tests layer, if there is one."""
    assert recipe.source is not None
    source = job.add(source_step(recipe.source, job.store, recipe.step_timeout))
    if recipe.install:
        job.add(install_step(recipe))
    tests = job.ensure(tests_step(recipe)).key if recipe.hidden or recipe.test_patch.strip() else None
    job.add(task_step(recipe, lambda: inside_layer(job.store, source.key, "testbed")))
    return tests


def _captured(interpreter: Interpreter | None) -> Mapping[str, str]:
    """The variables that everything in the image sees, besides the recipe's own.

    Steps that images share must not see those: they are no part of their keys.
    """
    variables = {"LANG": "C.UTF-8", "PATH": DEFAULT_PATH}
    if interpreter is not None:
        variables["PATH"] = f"{ENVIRONMENT}/bin:{DEFAULT_PATH}"
        variables |= {"CONDA_PREFIX": ENVIRONMENT, "CONDA_DEFAULT_ENV": ENVIRONMENT.rpartition("/")[2]}
    return variables


def _record(job: _Job, recipe: Recipe, tests: str | None) -> Image:
    last = job.layers[-1]
    environment = tuple(sorted({**job.environment, **dict(recipe.environment)}.items()))
    identity = {"kind": "image", "environment": dict(environment), "tests": tests}
    notes = {step: detail for step, detail in job.details.items() if detail}
    record = ImageRecord(
        name=job.name,
        key=step_key(last.key, identity),
        layers=tuple(layer.key for layer in job.layers),
        environment=environment,
        workdir=str(WORKDIR),
        tests_layer=tests,
        base_commit=last.facts.get("commit", ""),
        created=time.time(),
        notes=notes,
    )
    return image_of(put_if_new(job.store, record), job.store)


@dataclass(slots=True)
class _Job:
    """One build: the layers so far, and whom to tell."""

    store: Store
    name: str
    timeout: float
    progress: Progress | None
    environment: dict[str, str]
    layers: list[LayerRecord] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)

    def add_base(self) -> None:
        """Add the bottom layer."""
        record, made = ensure_base(self.store)
        self._tell("base", StepState.FINISHED if made else StepState.CACHED, record.key, record)
        self.layers.append(record)

    def add(self, step: Step) -> LayerRecord:
        """Add the layer that a step makes on top."""
        record = self.ensure(step)
        self.layers.append(record)
        self.details[step.name] = step.detail
        return record

    def ensure(self, step: Step) -> LayerRecord:
        """Return the layer that a step makes over the layers so far, without adding it."""
        parent = self.layers[-1].key
        key = step_key(parent, step.definition)

        def make(staging: Path) -> Made:
            self._tell(step.name, StepState.STARTED, key, detail=step.detail)
            trees = tuple(self.store.layer_tree(layer.key) for layer in self.layers)
            work = step.prepare(staging)
            environment = tuple(sorted(self.environment.items()))
            log = self.store.log_path(key)
            return run_step(Place(step.name, self.name, trees, environment, staging, log, self.timeout), work)

        record, made = self.store.ensure_layer(
            key,
            parent=parent,
            step=step.definition,
            make=make,
            on_wait=lambda: self._tell(step.name, StepState.WAITING, key, detail=step.detail),
        )
        self._tell(step.name, StepState.FINISHED if made else StepState.CACHED, key, record, step.detail)
        return record

    def _tell(self, step: str, state: StepState, key: str, record: LayerRecord | None = None, detail: str = "") -> None:
        if self.progress is not None:
            seconds, size = (record.seconds, record.bytes) if record is not None else (0.0, 0)
            self.progress(BuildEvent(self.name, step, state, key, seconds, size, detail))
