"""``minisandbox image ls|du|tree|verify|gc|rm|pin|unpin``: inspect and clean up the store."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Column,
    Progress,
    add_json_option,
    human_age,
    human_size,
    print_json,
    print_table,
    put,
)
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.store import Store
from minisandbox.store.collect import GRACE, Collected, collect, remove_failures, remove_images
from minisandbox.store.overview import ImageRow, Status, apparent_bytes, image_rows, parts
from minisandbox.store.sizes import StoreSizes, stack_of
from minisandbox.store.verify import Report, VerifyEvent, verify
from minisandbox.types import parse_size

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verbs."""
    ls = verbs.add_parser(
        "ls",
        help="list images with their sizes, ages and uses",
        description="List images. `unique` is the space that a removal frees, `shared` the space shared with others.",
    )
    ls.add_argument("--status", choices=[status.value for status in Status], help="only images in this state")
    _finish(ls, run_ls)
    du = verbs.add_parser(
        "du",
        help="show the store's disk usage by part, and how to remove each",
        description="Show the store's disk usage by part, every byte once, and the command that removes each part.",
    )
    _finish(du, run_du)
    tree = verbs.add_parser("tree", help="show which layers images share")
    _add_names(tree, "*")
    _finish(tree, run_tree)
    check = verbs.add_parser(
        "verify",
        help="find damaged layers, and quarantine them",
        description="Compare layers with their published records. Damaged ones are quarantined; a build replaces them.",
    )
    _add_names(check, "*")
    check.add_argument("--full", action="store_true", help="read every file, not only names, sizes and modes")
    _finish(check, run_verify, kept="the damaged layers found so far are quarantined")
    _configure_removal(verbs)
    for verb, what in (("pin", "never collect these images"), ("unpin", "allow these images to be collected again")):
        pin = verbs.add_parser(verb, help=what)
        _add_names(pin, "+")
        pin.set_defaults(run=run_pin, pin=verb == "pin")


def _configure_removal(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    gc = verbs.add_parser(
        "gc",
        help="remove unused layers and leftovers; by age or size, images too",
        description="Remove leftovers of dead processes, layers without an image, and with --budget or --unused-for "
        "images, the least recently used first. Images in use, pinned or kept stay.",
    )
    gc.add_argument("--budget", metavar="SIZE", help="maximum size of all layers together, such as 20G")
    gc.add_argument("--unused-for", metavar="TIME", help="remove images unused for this time, such as 30d or 12h")
    gc.add_argument("--keep", metavar="IMAGE", action="append", default=[], help="an image to keep, or a glob")
    gc.add_argument("--keep-tasks", metavar="TASKS", action="append", default=[], help="keep the images of these tasks")
    gc.add_argument(
        "--grace", metavar="TIME", default=f"{GRACE:.0f}s", help="spare layers used within this time (default: 1h)"
    )
    gc.add_argument("--freeze", action="store_true", help="freeze images; remove them only where --budget needs it")
    gc.add_argument("--dry-run", action="store_true", help="remove nothing, only print what would be removed")
    _finish(gc, run_gc, kept="everything not yet removed is kept")
    rm = verbs.add_parser(
        "rm",
        help="remove images, and the layers that only they use",
        description="Remove images, and the layers that only they use. Layers in use stay until `image gc`.",
    )
    _add_names(rm, "*")
    rm.add_argument("--status", choices=["failed"], help="failed: remove records, logs and layers of failed builds")
    rm.add_argument("--dry-run", action="store_true", help="remove nothing, only print what would be removed")
    _finish(rm, run_rm, kept="everything not yet removed is kept")


def _add_names(parser: argparse.ArgumentParser, count: str) -> None:
    parser.add_argument("images", metavar="IMAGE", nargs=count, help="an image's name, or a glob")


def _finish(parser: argparse.ArgumentParser, run: object, *, kept: str = "nothing was changed") -> None:
    add_json_option(parser)
    parser.set_defaults(run=run, kept=kept)


def chosen(store: Store, patterns: Iterable[str]) -> list[str]:
    """Return the names of images that match patterns, in the order of the patterns.

    Raises:
        NotFound: a pattern matches no image.
    """
    known, found = store.image_names(), []
    for pattern in patterns:
        names = [name for name in known if fnmatchcase(name, pattern)]
        if not names:
            raise NotFound(
                f"image {pattern!r} is not in the store {store.root}",
                hint="`minisandbox image ls` lists its images",
            )
        found += names
    return list(dict.fromkeys(found))


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration such as ``30d``, ``12h``, ``90s`` or ``0s``.

    Raises:
        InvalidValue: the text is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidValue(f"{option} {text!r} is not a duration", hint="write for instance 30d, 12h, 90m or 0s")
    return float(match[1]) * _SECONDS[match[2]]


# --- listing ---------------------------------------------------------------------------------------------------------


def run_ls(args: argparse.Namespace) -> int:
    """List the store's images."""
    rows = [row for row in image_rows(Store.open()) if args.status in (None, row.status.value)]
    if args.json:
        print_json([_row_json(row) for row in rows])
        return exits.OK
    columns = ("image", "status", "layers", "unique", "shared", "made", "used", "uses", "python")
    numbers = ("layers", "unique", "shared", "uses")
    print_table(
        [Column(title, number=title in numbers, whole=title != "python") for title in columns],
        [_row_cells(row) for row in rows],
    )
    for row in rows:
        if row.detail:
            put(f"{row.name}: {row.detail}")
    count = sum(row.status is Status.READY for row in rows)
    put(f"\n{count} images ready; a removal frees `unique`; `minisandbox image du` shows the whole store")
    return exits.OK


def _row_cells(row: ImageRow) -> list[str]:
    now = time.time()
    marks = [row.status.value, *(["in use"] if row.in_use else []), *(["frozen"] if row.frozen else [])]
    marks += ["pinned"] if row.pinned else []
    age, used = human_age(now - row.created), human_age(now - row.used)
    if row.record is None:
        return [row.name, ", ".join(marks), "", "", "", age if row.created else "", "", "", ""]
    sizes = [human_size(row.unique), human_size(row.shared)]
    python = str(row.record.notes.get("python", ""))
    return [row.name, ", ".join(marks), str(len(stack_of(row.record))), *sizes, age, used, str(row.uses), python]


def _row_json(row: ImageRow) -> dict[str, object]:
    record = row.record
    facts: dict[str, object] = {"name": row.name, "status": row.status, "detail": row.detail, "created": row.created}
    if record is not None:
        facts |= {
            "key": record.key,
            "commit": record.base_commit,
            "workdir": record.workdir,
            "notes": record.notes,
            "layers": stack_of(record),
            "shared_bytes": row.shared,
            "unique_bytes": row.unique,
            "used": row.used,
            "uses": row.uses,
            "in_use": row.in_use,
            "pinned": row.pinned,
            "frozen": row.frozen,
        }
    return facts


def run_du(args: argparse.Namespace) -> int:
    """Print the store's disk usage by part."""
    store = Store.open()
    found, apparent = parts(store), apparent_bytes(store)
    total = sum(part.bytes for part in found)
    if args.json:
        print_json({"store": store.root, "bytes": total, "image_bytes_unshared": apparent, "parts": found})
        return exits.OK
    put(f"{store.root}\n")
    numbers = ("size", "things")
    columns = [Column(title, number=title in numbers) for title in ("part", *numbers, "what", "removed by")]
    rows = [(part.name, human_size(part.bytes), str(part.count), part.purpose, part.removal) for part in found]
    print_table(columns, rows)
    put(f"\n{human_size(total)} in total; without sharing, the images' layers would take {human_size(apparent)}")
    return exits.OK


def run_tree(args: argparse.Namespace) -> int:
    """Print the tree of layers, with the images on top of them."""
    store = Store.open()
    sizes = StoreSizes(store, store.images())
    names = chosen(store, args.images) if args.images else list(sizes.images)
    stacks = [stack_of(sizes.images[name]) for name in names]
    if args.json:
        keys = dict.fromkeys(key for stack in stacks for key in stack)
        layers = {
            key: {
                "kind": str(sizes.layers[key].record.step.get("kind", "?")),
                "parent": sizes.layers[key].record.parent,
                "bytes": sizes.layers[key].total,
                "images": sizes.uses[key],
                "imported": sizes.layers[key].record.imported,
                "frozen": sizes.layers[key].frozen,
            }
            for key in keys
            if key in sizes.layers
        }
        print_json({"images": dict(zip(names, stacks, strict=True)), "layers": layers})
        return exits.OK
    _print_branch(sizes, names, stacks, 0)
    return exits.OK


def _print_branch(sizes: StoreSizes, names: Sequence[str], stacks: Sequence[tuple[str, ...]], depth: int) -> None:
    """Print the subtree of common layers, each layer once."""
    indent = "  " * depth
    groups: dict[str, list[int]] = {}
    for number, stack in enumerate(stacks):
        if len(stack) == depth:
            put(f"{indent}* {names[number]}")
        else:
            groups.setdefault(stack[depth], []).append(number)
    for key, members in groups.items():
        layer = sizes.layers.get(key)
        what = "missing" if layer is None else f"{layer.record.step.get('kind', '?')}, {human_size(layer.total)}"
        what += ", frozen" if layer is not None and layer.frozen else ""
        count = sizes.uses[key]
        put(f"{indent}{key[:12]} {what}" + (f", in {count} images" if count > 1 else ""))
        _print_branch(sizes, [names[i] for i in members], [stacks[i] for i in members], depth + 1)


# --- verifying -------------------------------------------------------------------------------------------------------


def run_verify(args: argparse.Namespace) -> int:
    """Verify layers."""
    store = Store.open()
    keys = None
    if args.images:
        images = [store.image(name) for name in chosen(store, args.images)]
        keys = [
            key for key in dict.fromkeys(key for image in images for key in stack_of(image)) if store.has_layer(key)
        ]
    with Progress() as progress:

        def show(event: VerifyEvent) -> None:
            progress.status(f"{event.done} of {event.total} layers")

        report = verify(store, full=args.full, keys=keys, progress=show)
    if args.json:
        print_json(report)
    else:
        _print_report(report, store)
    return exits.NEGATIVE if report.damaged or report.images else exits.OK


def _print_report(report: Report, store: Store) -> None:
    read = f", {human_size(report.bytes)} read" if report.bytes else ""
    put(f"{report.checked} layers, {report.files} files{read}: {len(report.damaged)} layers damaged")
    for damage in report.damaged:
        place = f"; now in {damage.quarantined}" if damage.quarantined else "; not quarantined: the store is read-only"
        put(f"\nlayer {damage.key[:16]} ({damage.kind}): {damage.count} problems{place}")
        for problem in damage.problems:
            put(f"  {problem}")
    if report.unlisted:
        put(f"{len(report.unlisted)} layers of an earlier MiniSandbox have no file list: not verified")
    if report.unreadable:
        put(f"{report.unreadable} files are not readable for this user: their content was not verified")
    if report.images:
        put(f"\nbroken images: {', '.join(report.images)}\nrebuild them with: minisandbox image build TASKS")
    elif not report.damaged:
        put(f"{store.root} is undamaged")


# --- removing --------------------------------------------------------------------------------------------------------


def run_gc(args: argparse.Namespace) -> int:
    """Remove unused layers, leftovers and, if asked, images."""
    from minisandbox.tasks import TaskSet  # noqa: PLC0415 - slow to import; only this verb needs it

    store = Store.open()
    keep = set(chosen(store, args.keep))
    for tasks in args.keep_tasks:
        keep |= {task.instance_id for task in TaskSet.load(tasks, allow_local_sources=True)}  # not built
    with Progress() as progress:
        done = collect(
            store,
            budget=None if args.budget is None else parse_size(args.budget),
            unused_for=None if args.unused_for is None else parse_duration(args.unused_for, "--unused-for"),
            keep=keep,
            grace=parse_duration(args.grace, "--grace"),
            freeze=args.freeze,
            dry_run=args.dry_run,
            progress=progress.status,
        )
    _print_collected(done, args, budget=None if args.budget is None else parse_size(args.budget))
    return exits.OK


def run_rm(args: argparse.Namespace) -> int:
    """Remove images by name, or the leftovers of failed builds."""
    if bool(args.images) == bool(args.status):
        raise InvalidValue("image rm needs one choice of images", hint="give names, or --status failed")
    store = Store.open()
    if args.status:
        done = remove_failures(store, dry_run=args.dry_run)
    else:
        with Progress() as progress:
            names = chosen(store, args.images)
            done = remove_images(store, names, dry_run=args.dry_run, progress=progress.status)
    _print_collected(done, args)
    return exits.OK


def _print_collected(done: Collected, args: argparse.Namespace, *, budget: int | None = None) -> None:
    if args.json:
        print_json(done)
        return
    for name in done.images:
        put(f"image {name}")
    for name in done.frozen:
        put(f"frozen: image {name}")
    for line in done.leftovers:
        put(line)
    would = "would be " if args.dry_run else ""
    put(
        f"{len(done.images)} images, {len(done.layers)} layers and {len(done.leftovers)} leftovers {would}removed, "
        f"{human_size(done.freed)} {would}freed; layers take {human_size(done.size)}"
    )
    if done.spared:
        put(f"{len(done.spared)} layers without an image stay: in use, or used recently (--grace)")
    if budget is not None and done.size > budget:
        put(f"still above --budget {human_size(budget)}: the rest is in use, pinned, kept, or was used within --grace")


def run_pin(args: argparse.Namespace) -> int:
    """Pin or unpin images."""
    store = Store.open()
    for name in chosen(store, args.images):
        (store.pin if args.pin else store.unpin)(name)
    return exits.OK
