"""``minisandbox image ls|show``: list the images of the store, and print one image."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    add_json_option,
    clean_line,
    human_age,
    human_seconds,
    print_json,
    print_table,
    put,
)
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.images import Image, load_image
from minisandbox.images.image import find_record, is_reference
from minisandbox.store import LayerRecord, Store
from minisandbox.store.overview import ImageRow, ImageStatus, apparent_bytes, image_rows, parts
from minisandbox.store.sizes import StoreSizes, stack_of
from minisandbox.values import human_size


def add_ls_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ls``."""
    parser.description = (
        "List images. `unique` is the space that a removal frees, `shared` the space shared with other images."
    )
    add_names(parser, "*")
    parser.add_argument("--status", choices=[status.value for status in ImageStatus], help="only images in this state")
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--tree", action="store_true", help="instead, show which layers the images share")
    views.add_argument(
        "--sizes", action="store_true", help="instead, show the store's disk usage by part, and what removes each"
    )
    add_json_option(parser)
    parser.set_defaults(run=run_ls)


def add_show_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``show``."""
    parser.add_argument("name", metavar="IMAGE", help="the image's name, or the reference that it was pulled by")
    add_json_option(parser)
    parser.set_defaults(run=run_show)


def add_names(parser: argparse.ArgumentParser, count: str) -> None:
    """Declare the image names that a verb takes.

    Args:
        parser: the verb's parser.
        count: the number of names, as argparse's ``nargs``.
    """
    parser.add_argument("images", metavar="IMAGE", nargs=count, help="an image's name, or a glob")


def chosen(store: Store, patterns: Iterable[str], among: Sequence[str] | None = None) -> list[str]:
    """Return the names of images that match patterns, in the order of the patterns.

    Args:
        store: the store.
        patterns: image names, globs, or references of pulled images.
        among: the names to choose from; None for the store's images.

    Raises:
        NotFound: a pattern matches no image.
    """
    candidates = store.image_names() if among is None else among
    matches: list[str] = []
    for pattern in patterns:
        names = [name for name in candidates if fnmatchcase(name, pattern)]
        if not names and is_reference(pattern):
            names = [find_record(store, pattern).name]
        if not names:
            raise NotFound(
                f"image {pattern!r} is not in the store {store.root}",
                hint="`minisandbox image ls` lists its images",
            )
        matches += names
    return list(dict.fromkeys(matches))


def add_set_options(parser: argparse.ArgumentParser) -> None:
    """Declare the image names and the task set that a verb takes."""
    from minisandbox.cli.common.task_sets import add_tasks_option  # noqa: PLC0415 - slow to import

    add_names(parser, "*")
    add_tasks_option(parser)


def named(store: Store, args: argparse.Namespace) -> list[str]:
    """Return the names of images that the command line selects by names and by tasks (:func:`add_set_options`).

    Raises:
        NotFound: a name matches no image, or the image of a task is not in the store.
    """
    names = chosen(store, args.images)
    if args.tasks is not None:
        from minisandbox.cli.common.task_sets import load  # noqa: PLC0415 - slow to import

        names += [task.instance_id for task in load(args)]
        if missing := sorted({*names} - {*store.image_names()}):
            raise NotFound(
                f"{len(missing)} images of {args.tasks} are not in the store {store.root}",
                reason=f"the first is {missing[0]}",
                hint=f"minisandbox image build {args.tasks}",
            )
    return list(dict.fromkeys(names))


def run_ls(args: argparse.Namespace) -> int:
    """List the store's images."""
    store = Store.open()
    if args.sizes:
        return _print_sizes(args, store)
    if args.tree and args.status is None:  # skip image_rows(), which is slow
        return _print_tree(args, store, chosen(store, args.images) if args.images else store.image_names())
    rows = [row for row in image_rows(store) if args.status in (None, row.status.value)]
    if args.images:
        names = chosen(store, args.images, [row.name for row in rows])
        rows = [row for row in rows if row.name in names]
    if args.tree:
        return _print_tree(args, store, [row.name for row in rows if row.record is not None])
    if args.json:
        print_json([_row_json(row) for row in rows])
    else:
        _print_rows(rows)
    return exits.OK


def _print_rows(rows: Sequence[ImageRow]) -> None:
    titles = ("image", "status", "layers", "unique", "shared", "made", "used", "uses", "python")
    numbers = ("layers", "unique", "shared", "uses")
    print_table(titles, [_row_cells(row) for row in rows], numbers=numbers, unwrapped=titles[:-1])
    for row in rows:
        if row.detail:
            put(f"{row.name}: {row.detail}")
    count = sum(row.status is ImageStatus.READY for row in rows)
    put(f"\n{count} images ready; a removal frees `unique`; `minisandbox image ls --sizes` shows the whole store")


def _row_cells(row: ImageRow) -> list[str]:
    now = time.time()
    flags = {"in use": row.in_use, "frozen": row.frozen, "kept": row.pinned}
    status = ", ".join([row.status.value, *(flag for flag, is_set in flags.items() if is_set)])
    age, used_ago = human_age(now - row.created), human_age(now - row.used)
    if row.record is None:
        return [row.name, status, "", "", "", age if row.created else "", "", "", ""]
    sizes = [human_size(row.unique), human_size(row.shared)]
    python = str(row.record.notes.get("python", ""))
    return [row.name, status, str(len(stack_of(row.record))), *sizes, age, used_ago, str(row.uses), python]


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
            "kept": row.pinned,
            "frozen": row.frozen,
        }
    return facts


def _print_sizes(args: argparse.Namespace, store: Store) -> int:
    """Print the store's disk usage by part."""
    if args.images or args.status:
        raise InvalidValue("image ls --sizes is for the whole store", hint="leave out images and --status")
    store_parts, unshared_bytes = parts(store), apparent_bytes(store)
    total = sum(part.bytes for part in store_parts)
    if args.json:
        print_json({"store": store.root, "bytes": total, "image_bytes_unshared": unshared_bytes, "parts": store_parts})
        return exits.OK
    put(f"{store.root}\n")
    rows = [(part.name, human_size(part.bytes), str(part.count), part.purpose, part.removal) for part in store_parts]
    print_table(("part", "size", "things", "what", "removed by"), rows, numbers=("size", "things"))
    put(f"\n{human_size(total)} in total; without sharing, the images' layers would take {human_size(unshared_bytes)}")
    return exits.OK


def _print_tree(args: argparse.Namespace, store: Store, names: Sequence[str]) -> int:
    """Print the layers as a tree, with the images that end at each layer."""
    sizes = StoreSizes(store, store.images())
    stacks = [stack_of(sizes.images[name]) for name in names]
    if args.json:
        keys = dict.fromkeys(key for stack in stacks for key in stack)
        layers = {key: _layer_json(sizes, key) for key in keys if key in sizes.layers}
        print_json({"images": dict(zip(names, stacks, strict=True)), "layers": layers})
    else:
        _print_branch(sizes, names, stacks, 0)
    return exits.OK


def _layer_json(sizes: StoreSizes, key: str) -> dict[str, object]:
    layer = sizes.layers[key]
    return {
        "kind": layer.kind,
        "parent": layer.parent,
        "bytes": layer.total,
        "images": sizes.uses[key],
        "imported": layer.imported,
        "frozen": layer.frozen,
    }


def _print_branch(sizes: StoreSizes, names: Sequence[str], stacks: Sequence[tuple[str, ...]], depth: int) -> None:
    """Print a subtree of the layers, with shared layers printed once."""
    indent = "  " * depth
    groups: dict[str, list[int]] = {}
    for index, stack in enumerate(stacks):
        if len(stack) == depth:
            put(f"{indent}* {names[index]}")
        else:
            groups.setdefault(stack[depth], []).append(index)
    for key, indices in groups.items():
        layer = sizes.layers.get(key)
        description = "missing" if layer is None else f"{layer.kind}, {human_size(layer.total)}"
        description += ", frozen" if layer is not None and layer.frozen else ""
        count = sizes.uses[key]
        put(f"{indent}{key[:12]} {description}" + (f", in {count} images" if count > 1 else ""))
        _print_branch(sizes, [names[index] for index in indices], [stacks[index] for index in indices], depth + 1)


def run_show(args: argparse.Namespace) -> int:
    """Print one image."""
    image = load_image(Store.open(), args.name)
    if args.json:
        frozen = [layer.key for layer in image.records() if image.store.is_frozen(layer.key)]
        facts = {**image_facts(image), "layers": image.records(), "frozen": frozen}
        print_json({**facts, "environment": dict(image.environment)})
        return exits.OK
    put(clean_line(f"{image.name}   {image.key}"))
    for note, text in image.notes.items():
        put(f"{note}: {text}")
    put(clean_line(f"workdir: {image.workdir}   commit: {image.commit or 'no repository'}"))
    for name in ("Entrypoint", "Cmd"):
        if isinstance(command := image.config.get(name), list):
            put(clean_line(f"{name.lower()}: {shlex.join(map(str, command))}"))
    for name, value in image.environment:
        put(clean_line(f"{name}={value}"))
    put()
    titles = ("layer", "key", "size", "files", "made in", "made")
    rows = [_layer_cells(image, layer) for layer in image.records()]
    print_table(titles, rows, numbers=("size", "files", "made in"), unwrapped=titles)
    return exits.OK


def _layer_cells(image: Image, layer: LayerRecord) -> tuple[str, ...]:
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(layer.created))
    size, seconds = human_size(layer.bytes), human_seconds(layer.seconds)
    return _kind(image, layer), layer.key[:16], size, str(layer.files), seconds, created


def _kind(image: Image, layer: LayerRecord) -> str:
    tests = " (tests)" if layer.key == image.tests_layer else ""
    return str(layer.step.get("kind", "?")) + tests + (", frozen" if image.store.is_frozen(layer.key) else "")


def image_facts(image: Image) -> dict[str, object]:
    """Return the fields of an image for JSON output."""
    return {
        "name": image.name,
        "key": image.key,
        "created": image.created,
        "commit": image.commit,
        "workdir": image.workdir,
        "notes": image.notes,
        "own_root": image.own_root,
        "config": image.config,
    }
