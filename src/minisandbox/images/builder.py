"""Build images from recipes: run each step once, cache its layer, and record failed builds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import BuildError, MiniSandboxError, PatchError, UnfitTree
from minisandbox.images.base import BaseEntry, base_key
from minisandbox.images.image import Image, image_of, make_base, put_if_new
from minisandbox.images.plan import ImagePlan, Planner
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.images.python.lock import lock_of
from minisandbox.images.runner import MERGED, BuildSession, BuildStep, StepContext
from minisandbox.spec import Buildable, Lock, Recipe
from minisandbox.store import FailureRecord, ImageRecord, LayerRecord, Made, Store, step_key
from minisandbox.values import JSONValue

if TYPE_CHECKING:
    from minisandbox.images.dockerfile.evaluation import BuildOptions


def build(
    recipe: Buildable, *, store: Store, name: str, progress: Progress | None = None, mirrors: Path | None = None
) -> Image:
    """Build an image; reuse the layers that the store already has.

    Args:
        recipe: the recipe.
        store: the store for the layers.
        name: the image's name; an earlier image of that name is replaced.
        progress: called when each step starts and ends.
        mirrors: a directory of git repositories that are tried before the network; see :class:`Mirrors`.

    Returns:
        The image.

    Raises:
        InvalidValue: the name is invalid.
        InterpreterNotFound: no interpreter of this machine satisfies the recipe.
        SourceError: the source cannot be fetched.
        PatchError: a patch does not apply.
        BuildError: a step failed; its layer is not published, and its log is kept.
        IndexUnavailable: a step failed while the package index was unavailable.
        DiskFull: the disk is full; finished layers are kept.
        SandboxCreationError: this machine cannot create a sandbox.
    """
    planner = Planner(store, mirrors)
    plan = planner.plan(name, recipe)
    with BuildSession(store) as session:
        maker = Maker(session, planner.base(), progress)
        maker.make_base(plan)
        for step in plan.all_steps():
            try:
                maker.make(plan, step)
            except MiniSandboxError as error:
                note_failure(store, plan, step, error)
                raise
    return record_image(plan, store)


def read_dockerfile(dockerfile: Path, context: Path, *, store: Store, options: BuildOptions | None = None) -> Recipe:
    """Read a Dockerfile as a recipe for :func:`minisandbox.images.build`; missing base images are pulled.

    Args:
        dockerfile: the path of the Dockerfile.
        context: the directory that COPY and ADD take files from.
        store: the store of the base images.
        options: the stage, arguments, network and secrets.

    Returns:
        The recipe. Its base may be the recipe of another stage.

    Raises:
        InvalidValue: the file cannot be read.
        DockerfileError: the Dockerfile is invalid or unsupported; the error names the line. No instruction has run.
        NotFound: a base image does not exist.
        RegistryError: a base image cannot be fetched from its registry.
        ImageRefused: a base image is malformed or hostile.
    """
    from minisandbox.images.dockerfile.evaluation import BuildOptions  # noqa: PLC0415 - loads a parser
    from minisandbox.images.dockerfile.reading import evaluated  # noqa: PLC0415 - loads a parser

    return evaluated(dockerfile, context, options or BuildOptions(), Planner(store).container)


@dataclass(slots=True)
class Maker:
    """Builds the layers of plans, and reports progress.

    Attributes:
        session: the build session that all plans share.
        base: the entries of the base layer.
        progress: called when each step starts and ends.
    """

    session: BuildSession
    base: tuple[BaseEntry, ...]
    progress: Progress | None = None

    def make_base(self, plan: ImagePlan) -> LayerRecord:
        """Return the base layer, in which MiniSandbox's own tools run; build the layer if it is missing."""
        record, is_new = make_base(self.session.store, self.base)
        self._report(plan.name, "base", StepState.FINISHED if is_new else StepState.CACHED, record.key, record)
        return record

    def make(self, plan: ImagePlan, step: BuildStep) -> LayerRecord:
        """Return the layer of a step; build the layer if it is missing. The layers below must exist.

        Raises:
            MiniSandboxError: the step failed; see :func:`build`.
        """
        store, is_waiting = self.session.store, False

        def on_wait() -> None:
            nonlocal is_waiting
            self.session.cancellation.check()
            if not is_waiting:
                is_waiting = True
                report(StepState.WAITING)

        def make(staging: Path) -> Made:
            self.session.cancellation.check()
            report(StepState.STARTED)
            with store.hold(*step.below, *step.needs):  # protects the layers from concurrent garbage collection
                layers, helper = tuple(map(store.layer_tree, step.below)), store.layer_tree(base_key(self.base))
                log = store.log_path(step.key)
                return step.make(StepContext(plan.name, step, layers, staging, log, self.session, helper))

        def report(state: StepState, record: LayerRecord | None = None) -> None:
            self._report(plan.name, step.name, state, step.key, record, step.detail)

        try:
            parent = step.below[-1] if step.below else None
            record, is_new = store.ensure_layer(
                step.key, parent=parent, step=step.definition, make=make, on_wait=on_wait, stacked_with=step.below
            )
        except UnfitTree as error:  # caused by the step's files, so report a failed step
            raise BuildError(
                f"what build step {step.name!r} of image {plan.name!r} wrote cannot be kept: {error.what}",
                step=step.name,
                reason=error.reason,
                hint=error.hint,
            ) from error
        report(StepState.FINISHED if is_new else StepState.CACHED, record)
        return record

    def _report(
        self, image: str, step: str, state: StepState, key: str, record: LayerRecord | None, detail: str = ""
    ) -> None:
        if self.progress is not None:
            seconds, size = (record.seconds, record.bytes) if record is not None else (0.0, 0)
            self.progress(BuildEvent(image, step, state, key, seconds, size, detail))


def record_image(plan: ImagePlan, store: Store) -> Image:
    """Record the image of a plan whose layers all exist.

    Raises:
        BuildError: the image differs from its lock.
    """
    base, commit = plan.base, store.layer(plan.layers[-1]).facts.get("commit", "")
    identity: dict[str, JSONValue] = {
        "kind": "image", "environment": dict(base.environment), "tests": plan.tests,
        "workdir": str(base.workdir), "user": base.user, "config": base.config,
    }  # fmt: skip
    record = ImageRecord(
        plan.name, step_key(plan.content, identity), plan.layers, base.environment, str(base.workdir), plan.tests,
        commit, time.time(), {**base.notes, **_notes(plan, store)}, base.own_root, base.user, base.config,
    )  # fmt: skip
    image = image_of(record, store)
    if plan.lock is not None:
        _check_lock(image, plan.lock)
    image = image_of(put_if_new(store, record), store)
    store.remove_failure(plan.name)
    return image


def _notes(plan: ImagePlan, store: Store) -> dict[str, str]:
    notes = {step.name: step.detail for step in plan.steps if step.detail}
    facts = {name: text for key in plan.layers for name, text in store.layer(key).facts.items()}
    if merged := facts.get(MERGED):
        notes["submodules"] = ", ".join(merged.splitlines())
    if submodules := facts.get("submodules"):
        notes["submodules, left empty"] = ", ".join(submodules.splitlines())
    if pointers := facts.get("pointers"):
        notes["Git LFS pointers, left as they are"] = ", ".join(pointers.splitlines())
    return notes


def _check_lock(image: Image, lock: Lock) -> None:
    """Check that the image has the locked versions; ignore the base layer, which depends on the host's /etc."""
    old, new = lock.installed, lock_of(image.name, image.records()).installed
    lines = [
        f"{name}: {old.get(name, 'not there')} in the lock, {new.get(name, 'not there')} now"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if lines:
        raise BuildError(
            f"image {image.name!r} is not what its lock says",
            reason="\n".join(lines[:20]),
            hint="is it the same recipe's lock?",
        )


def note_failure(store: Store, plan: ImagePlan, step: BuildStep, error: MiniSandboxError) -> None:
    """Record that a step of an image failed, unless the cause is a full disk or an unreachable index."""
    if not isinstance(error, BuildError | PatchError):
        return
    reason = "\n".join(filter(None, (error.what, error.reason)))
    record = FailureRecord(
        plan.name, step.name, step.key, step.below or plan.base.layers, step.environment, str(step.workdir),
        time.time(), reason, own_root=step.own_root,
    )  # fmt: skip
    store.put_failure(record)


def known_failure(record: FailureRecord, store: Store) -> BuildError:
    """Return the error for a step that failed in an earlier build and is not retried."""
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    log = store.log_path(record.key)
    return BuildError(
        f"build step {record.step!r} of image {record.image!r} failed on {date}, and was not tried again",
        step=record.step,
        log=log,
        reason=record.reason,
        hint=f"--retry-failed tries it again; its log is {log}",
    )
