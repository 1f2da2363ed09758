"""``minisandbox compare``: validate tasks in sandboxes and in an engine's containers, and print both side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minisandbox.cli.common import exits
from minisandbox.cli.common.backends import ENGINES
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.grading_options import add_grading_arguments, grading_options
from minisandbox.cli.common.output import (
    Column,
    Progress,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.common.task_sets import add_tasks_arguments, load
from minisandbox.errors import GradingError
from minisandbox.grade import GradingOptions, Status, Validated, run_validations
from minisandbox.sandbox.engines.client import Client
from minisandbox.sandbox.engines.images import ensure_image, image_size
from minisandbox.store import Store
from minisandbox.tasks import Task
from minisandbox.types import human_size


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tasks_arguments(parser)
    parser.add_argument("--backend", choices=ENGINES, default=ENGINES[0], help=f"the engine (default: {ENGINES[0]})")
    add_grading_arguments(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="build steps at once (default: one per CPU)")
    add_json_option(parser)
    parser.set_defaults(run=run, kept="finished layers and the engine's images are kept")


@dataclass(frozen=True, slots=True)
class Compared:
    """A task in both backends.

    Attributes:
        sandbox: its validation in sandboxes.
        engine: its validation in containers.
        imported_in: seconds that the engine took to import its image; 0.0 where it had it.
        disk: bytes of its image's layers in the store.
        engine_disk: bytes of its image in the engine.
    """

    sandbox: Validated
    engine: Validated
    imported_in: float
    disk: int
    engine_disk: int

    @property
    def equal(self) -> bool:
        """Whether both say the same, of the task and of each run of its tests."""
        return verdicts(self.sandbox) == verdicts(self.engine)


def verdicts(found: Validated) -> tuple[object, ...]:
    """Return what a validation says, without times and texts."""
    runs = ((one.verdict, one.reason) for one in (*found.reference, *found.empty))
    return (found.status, found.cause, found.tests, *runs)


def run(args: argparse.Namespace) -> int:
    """Compare; return 0 if all verdicts are equal, 1 if one differs, 30 after an infrastructure error."""
    require_positive(args, "jobs")
    grading, tasks, client = grading_options(args), load(args), Client.find(args.backend)
    with Progress() as progress:
        builder = Builder(Store.open(), progress, args.repo_mirrors)
        builder.build_all(tasks, args.jobs)
        found: list[Compared] = []
        for task in tasks:
            progress.status(f"{len(found)} of {len(tasks)} tasks; {task.instance_id}")
            found.append(one := compare(task, builder, client, grading))
            progress.note(f"{len(found)}/{len(tasks)} {task.instance_id}: {'equal' if one.equal else 'DIFFERENT'}")
    layers = {one.key: one.bytes for row in found for one in row.sandbox.layers}
    _print(found, args, sum(layers.values()))
    if any(Status.ERROR in (one.sandbox.status, one.engine.status) for one in found):
        return GradingError.exit_code
    return exits.OK if all(one.equal for one in found) else exits.NEGATIVE


def compare(task: Task, builder: Builder, client: Client, grading: GradingOptions) -> Compared:
    """Validate one task in both backends, one after the other.

    Raises:
        MiniSandboxError: its image could not be built or imported.
    """
    image = builder.image_of(task)
    start = time.monotonic()
    reference, made = ensure_image(client, image.spec())
    seconds = time.monotonic() - start if made else 0.0
    ours, theirs = (
        run_validations(
            [task], lambda _, one=one: one, timeout=grading.timeout, confirm=grading.confirm  # type: ignore[misc] # binds
        )[0]
        for one in (image, replace(image, backend=client.name))
    )  # fmt: skip
    disk = sum(one.bytes for one in ours.layers)
    return Compared(ours, theirs, seconds, disk, image_size(client, reference))


def _print(found: Sequence[Compared], args: argparse.Namespace, unique: int) -> None:
    equal = sum(one.equal for one in found)
    engine_disk = sum(one.engine_disk for one in found)
    if args.json:
        rows = [{"instance_id": one.sandbox.instance_id, "equal": one.equal, **_fields(one)} for one in found]
        print_json({"engine": args.backend, "tasks": rows, "disk": unique, "engine_disk": engine_disk})
        return
    numbers = ("seconds", "seconds", "import", "disk", "disk")
    backends = ("sandbox", args.backend, args.backend, "sandbox", args.backend)
    columns = [Column("task", whole=True), Column("sandbox"), Column(args.backend), Column("verdicts")]
    columns += [Column(f"{name} {backend}", number=True) for name, backend in zip(numbers, backends, strict=True)]
    print_table(columns, [_row(one) for one in found])
    ours, theirs = sum(one.sandbox.seconds for one in found), sum(one.engine.seconds for one in found)
    put(f"\n{equal} of {len(found)} verdicts are equal")
    put(f"sandbox: {human_seconds(ours)}, {human_size(unique)} of layers, each counted once")
    put(f"{args.backend}: {human_seconds(theirs)}, {human_size(engine_disk)} of images")


def _row(one: Compared) -> tuple[str, ...]:
    return (
        one.sandbox.instance_id, one.sandbox.status, one.engine.status, "equal" if one.equal else "DIFFERENT",
        f"{one.sandbox.seconds:.1f}", f"{one.engine.seconds:.1f}", f"{one.imported_in:.1f}", human_size(one.disk),
        human_size(one.engine_disk),
    )  # fmt: skip


def _fields(one: Compared) -> dict[str, object]:
    sides = {"sandbox": one.sandbox, "engine": one.engine}
    table = {
        side: {"status": of.status, "cause": of.cause, "detail": of.detail, "seconds": of.seconds}
        for side, of in sides.items()
    }
    return {**table, "imported_in": one.imported_in, "disk": one.disk, "engine_disk": one.engine_disk}
