"""``minisandbox compare``: validate tasks in sandboxes and in containers, and print the results side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import (
    Progress,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.common.run_options import add_grading_arguments, grading_options
from minisandbox.cli.common.task_sets import add_jobs_option, add_tasks_arguments, load
from minisandbox.errors import GradingError
from minisandbox.grade import GradingOptions, Status, Validated, run_validations
from minisandbox.sandbox.engines.client import Client
from minisandbox.sandbox.engines.images import ensure_image, image_size
from minisandbox.store import Store
from minisandbox.tasks import Task
from minisandbox.types import ENGINES
from minisandbox.values import human_size


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    add_tasks_arguments(parser)
    parser.add_argument("--backend", choices=ENGINES, default=ENGINES[0], help=f"the engine (default: {ENGINES[0]})")
    add_grading_arguments(parser)
    add_jobs_option(parser)
    add_json_option(parser)
    parser.set_defaults(run=run, kept="finished layers and the engine's images are kept")


@dataclass(frozen=True, slots=True)
class Compared:
    """The validations of a task in both backends.

    Attributes:
        sandbox: the validation in sandboxes.
        engine: the validation in containers.
        imported_in: seconds that the engine took to import the task's image; 0.0 if the engine already had the image.
        disk: bytes of the image's layers in the store.
        engine_disk: bytes of the image in the engine.
    """

    sandbox: Validated
    engine: Validated
    imported_in: float
    disk: int
    engine_disk: int

    @property
    def equal(self) -> bool:
        """Whether both validations and all their test runs have the same verdicts."""
        return verdicts(self.sandbox) == verdicts(self.engine)


def verdicts(validation: Validated) -> tuple[object, ...]:
    """Return the verdicts of a validation, without times and messages, which differ between runs."""
    runs = ((run.verdict, run.reason) for run in (*validation.reference, *validation.empty))
    return (validation.status, validation.cause, validation.tests, *runs)


def run(args: argparse.Namespace) -> int:
    """Compare the backends; return 0 if all verdicts are equal, 1 if one differs, 30 after an infrastructure error."""
    require_positive(args, "jobs")
    grading, tasks, client = grading_options(args), load(args), Client.find(args.backend)
    with Progress() as progress:
        builder = Builder(Store.open(), progress, args.repo_mirrors)
        builder.build_all(tasks, args.jobs)
        rows: list[Compared] = []
        for task in tasks:
            progress.status(f"{len(rows)} of {len(tasks)} tasks; {task.instance_id}")
            rows.append(row := compare(task, builder, client, grading))
            progress.note(f"{len(rows)}/{len(tasks)} {task.instance_id}: {'equal' if row.equal else 'DIFFERENT'}")
    layers = {layer.key: layer.bytes for row in rows for layer in row.sandbox.layers}
    _print(rows, args, sum(layers.values()))
    if any(Status.ERROR in (row.sandbox.status, row.engine.status) for row in rows):
        return GradingError.exit_code
    return exits.OK if all(row.equal for row in rows) else exits.NEGATIVE


def compare(task: Task, builder: Builder, client: Client, grading: GradingOptions) -> Compared:
    """Validate one task in both backends, one after the other.

    Raises:
        MiniSandboxError: the task's image could not be built or imported.
    """
    image = builder.image_of(task)
    start = time.monotonic()
    reference, was_imported = ensure_image(client, image.spec())
    import_seconds = time.monotonic() - start if was_imported else 0.0
    in_sandbox, in_engine = (
        run_validations(
            [task], lambda _, image=backend_image: image, timeout=grading.timeout, confirm=grading.confirm  # type: ignore[misc] # the default binds the loop variable
        )[0]
        for backend_image in (image, replace(image, backend=client.name))
    )  # fmt: skip
    disk = sum(layer.bytes for layer in in_sandbox.layers)
    return Compared(in_sandbox, in_engine, import_seconds, disk, image_size(client, reference))


def _print(rows: Sequence[Compared], args: argparse.Namespace, disk: int) -> None:
    equal_count = sum(row.equal for row in rows)
    engine_disk = sum(row.engine_disk for row in rows)
    if args.json:
        tasks = [{"instance_id": row.sandbox.instance_id, "equal": row.equal, **_fields(row)} for row in rows]
        print_json({"engine": args.backend, "tasks": tasks, "disk": disk, "engine_disk": engine_disk})
        return
    engine = args.backend
    numbers = ("seconds sandbox", f"seconds {engine}", f"import {engine}", "disk sandbox", f"disk {engine}")
    titles = ("task", "sandbox", engine, "verdicts", *numbers)
    print_table(titles, [_row(row) for row in rows], numbers=numbers, unwrapped=["task"])
    seconds, engine_seconds = sum(row.sandbox.seconds for row in rows), sum(row.engine.seconds for row in rows)
    put(f"\n{equal_count} of {len(rows)} verdicts are equal")
    put(f"sandbox: {human_seconds(seconds)}, {human_size(disk)} of layers, each counted once")
    put(f"{args.backend}: {human_seconds(engine_seconds)}, {human_size(engine_disk)} of images")


def _row(row: Compared) -> tuple[str, ...]:
    return (
        row.sandbox.instance_id, row.sandbox.status, row.engine.status, "equal" if row.equal else "DIFFERENT",
        f"{row.sandbox.seconds:.1f}", f"{row.engine.seconds:.1f}", f"{row.imported_in:.1f}", human_size(row.disk),
        human_size(row.engine_disk),
    )  # fmt: skip


def _fields(row: Compared) -> dict[str, object]:
    validations = {"sandbox": row.sandbox, "engine": row.engine}
    fields = {
        name: {field: getattr(validation, field) for field in ("status", "cause", "detail", "seconds")}
        for name, validation in validations.items()
    }
    return {**fields, "imported_in": row.imported_in, "disk": row.disk, "engine_disk": row.engine_disk}
