"""``minisandbox image build|ls|show``."""

from __future__ import annotations

import argparse
import time
import tomllib
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.builds import Builder
from minisandbox.cli.output import (
    Column,
    Progress,
    add_json_option,
    human_seconds,
    human_size,
    print_json,
    print_table,
    require_positive,
    say,
)
from minisandbox.cli.tasks import add_tasks_arguments, load
from minisandbox.errors import InvalidValue, MiniSandboxError, TaskFileError
from minisandbox.images import Image, Recipe, image_sizes, list_images, load_image, total_size
from minisandbox.store import Store
from minisandbox.tasks import BuildSpec, build_spec

KEPT = "finished layers are kept; the same command goes on from there"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    make = verbs.add_parser(
        "build",
        help="build the image of a recipe, or those of tasks",
        description="Build the image of a recipe (a file that ends in .toml), or those of the tasks of a set.",
    )
    add_tasks_arguments(make)
    make.add_argument("--name", help="what the recipe's image is called (default: the file's name)")
    make.add_argument("--workers", type=int, default=1, metavar="N", help="builds at once (default: 1)")
    add_json_option(make)
    make.set_defaults(run=run_build, kept=KEPT)
    ls = verbs.add_parser("ls", help="list the images of the store")
    add_json_option(ls)
    ls.set_defaults(run=run_ls)
    show = verbs.add_parser("show", help="print an image's layers and variables")
    show.add_argument("name", metavar="NAME", help="the image")
    add_json_option(show)
    show.set_defaults(run=run_show)


def run_build(args: argparse.Namespace) -> int:
    """Build images; the first failure decides the exit status, and costs the others nothing."""
    require_positive(args, "workers")
    is_recipe = args.tasks.endswith(".toml")
    if is_recipe and args.only:
        raise InvalidValue("--only chooses among tasks, and a recipe has none", hint="leave it out")
    if args.name and not is_recipe:
        raise InvalidValue("--name is for a recipe's image", hint="images of tasks are called after their ids")
    with Progress() as progress:
        builder = Builder(Store.open(), progress)
        if is_recipe:
            path = Path(args.tasks)
            try:
                images = [builder.build(args.name or path.stem, read_recipe(path))]
            except MiniSandboxError as failure:
                failure.about(str(path))
                raise
        else:
            images = list(builder.build_all(load(args), args.workers).values())
    if args.json:
        print_json([{**_facts(image), "built_in": builder.seconds.get(image.name, 0.0)} for image in images])
    else:
        _print_images(images, builder.seconds)
    for error in list(builder.failures.values())[1:]:
        say(f"minisandbox: {error.what}")
    if builder.failures:
        raise next(iter(builder.failures.values()))
    return exits.OK


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file: the keys of a task's ``build``, as TOML.

    Args:
        path: the file; relative paths in it are below its directory.

    Raises:
        InvalidValue: it cannot be read, or a key or value in it cannot be used.
    """
    try:
        return _recipe(build_spec(tomllib.loads(path.read_text(encoding="utf-8")), base=path.absolute().parent))
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}", hint="give a recipe (.toml) or a task set") from error
    except ValueError as error:
        if isinstance(error, InvalidValue):
            raise error.about(str(path)) from error
        if isinstance(error, TaskFileError):
            what = error.what.replace("'build.", "'")
            raise InvalidValue(f"{path}: {what}", reason=error.reason, hint=error.hint) from error
        raise InvalidValue(f"{path} is not TOML", reason=str(error)) from error


def _recipe(spec: BuildSpec) -> Recipe:
    return Recipe(
        python=spec.python,
        requirements=spec.requirements,
        source=None if spec.source is None else spec.source.source(),
        install=spec.install,
        environment=spec.environment,
    )


def run_ls(args: argparse.Namespace) -> int:
    """List the store's images."""
    images = list_images(Store.open())
    if args.json:
        sizes = image_sizes(images)
        print_json([{**_facts(image), **_size(sizes[image.name].shared, sizes[image.name].unique)} for image in images])
    else:
        _print_images(images, {})
    return exits.OK


def run_show(args: argparse.Namespace) -> int:
    """Print one image."""
    image = load_image(Store.open(), args.name)
    if args.json:
        print_json({**_facts(image), "layers": image.records(), "environment": dict(image.environment)})
        return exits.OK
    print(f"{image.name}   {image.key}")
    for note, text in image.notes.items():
        print(f"{note}: {text}")
    print(f"workdir: {image.workdir}   commit: {image.commit or 'no repository'}")
    for name, value in image.environment:
        print(f"{name}={value}")
    print()
    columns = ("layer", "key", "size", "files", "made in", "made")
    print_table(
        [Column(title, number=title in ("size", "files", "made in"), whole=True) for title in columns],
        [
            (
                str(layer.step.get("kind", "?")) + (" (tests)" if layer.key == image.tests_layer else ""),
                layer.key[:16],
                human_size(layer.bytes),
                str(layer.files),
                human_seconds(layer.seconds),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(layer.created)),
            )
            for layer in image.records()
        ],
    )
    return exits.OK


def _facts(image: Image) -> dict[str, object]:
    return {
        "name": image.name,
        "key": image.key,
        "created": image.created,
        "commit": image.commit,
        "workdir": image.workdir,
        "notes": image.notes,
    }


def _size(shared: int, unique: int) -> dict[str, object]:
    return {"shared_bytes": shared, "unique_bytes": unique}


def _print_images(images: list[Image], built: dict[str, float]) -> None:
    sizes = image_sizes(images)
    columns = ["image", "layers", "shared", "unique", *(["built in"] if built else []), "python"]
    rows = []
    for image in images:
        size, seconds = sizes[image.name], built.get(image.name, 0.0)
        time_cell = [human_seconds(seconds) if seconds else "was there"] if built else []
        layers = str(len(image.records()))
        python = str(image.notes.get("python", ""))
        rows.append([image.name, layers, human_size(size.shared), human_size(size.unique), *time_cell, python])
    numbers = ("layers", "shared", "unique", "built in")
    print_table([Column(title, number=title in numbers, whole=title == "image") for title in columns], rows)
    print(f"\n{len(images)} images, {human_size(total_size(images))} together")
