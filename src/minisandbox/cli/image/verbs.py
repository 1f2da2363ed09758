"""``minisandbox image build|show``; other verbs have modules of their own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import (
    Column,
    Progress,
    add_json_option,
    clean_line,
    human_seconds,
    human_size,
    print_json,
    print_table,
    put,
    require_positive,
    say,
)
from minisandbox.cli.common.task_sets import add_tasks_arguments, load
from minisandbox.cli.image import dockerfile, freeze, pins, pull, pythons, shell, transfer
from minisandbox.cli.image import store as store_verbs
from minisandbox.errors import InvalidValue
from minisandbox.images import (
    Budget,
    Buildable,
    Image,
    Lock,
    PythonRecipe,
    image_sizes,
    load_image,
    read_lock,
    total_size,
)
from minisandbox.store import LayerRecord, Store
from minisandbox.tasks import read_recipe
from minisandbox.types import parse_size

KEPT = "finished layers are kept; the same command resumes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    make = verbs.add_parser(
        "build",
        help="build the image of a recipe or a Dockerfile, or the images of tasks",
        description="Build the image of a recipe (a .toml file) or of a Dockerfile (--file), or the images of tasks.",
    )
    _add_build_options(make)
    pull.configure(verbs)
    pins.configure(verbs)
    pythons.configure(verbs)
    shell.configure(verbs)
    show = verbs.add_parser("show", help="print an image's layers and environment variables")
    show.add_argument("name", metavar="NAME", help="the image")
    add_json_option(show)
    show.set_defaults(run=run_show)
    store_verbs.configure(verbs)
    freeze.configure(verbs)
    transfer.configure(verbs)


def _add_build_options(make: argparse.ArgumentParser) -> None:
    add_tasks_arguments(make)
    make.add_argument("--name", help="the name of the recipe's image (default: the file's name)")
    make.add_argument("--jobs", type=int, metavar="N", help="build steps at once (default: one per CPU)")
    make.add_argument(
        "--memory", metavar="SIZE", help="memory for all build steps together, such as 16G; each gets up to 4G of it"
    )
    make.add_argument(
        "--retry-failed", action="store_true", help="retry steps of tasks that failed in an earlier build"
    )
    make.add_argument(
        "--locked", metavar="LOCK", type=Path, help="build from exactly the files of a lock (`image pins --lock`)"
    )
    make.add_argument(
        "--exclude-newer", metavar="DATE", help="ignore packages uploaded on this day or later, such as 2024-03-01"
    )
    dockerfile.add_options(make)
    add_json_option(make)
    make.set_defaults(run=run_build, kept=KEPT)


def run_build(args: argparse.Namespace) -> int:
    """Build images. A failure does not stop the others; the first one sets the exit status."""
    require_positive(args, "jobs")
    is_recipe = args.file is not None or args.tasks.endswith(".toml")
    if is_recipe and args.only:
        raise InvalidValue("--only selects tasks, and a recipe has none", hint="leave it out")
    if args.name and not is_recipe:
        raise InvalidValue("--name is for a recipe's image", hint="images of tasks are named after their ids")
    recipes: Mapping[str, Callable[[], Buildable]]
    if args.file is not None:
        recipes = dockerfile.recipes(args, Store.open())
    else:
        recipes = _pinned_recipes(args, _recipe_of_file(args) if is_recipe else _recipes_of_tasks(args))
    mirrors = None if args.repo_mirrors is None else _directory(args.repo_mirrors)
    with Progress() as progress:
        builder = Builder(Store.open(), progress, mirrors)
        images = list(
            builder.build_recipes(recipes, _budget(args), retry_failed=is_recipe or args.retry_failed).values()
        )
    if args.json:
        print_json([{**_facts(image), "built_in": builder.seconds.get(image.name, 0.0)} for image in images])
    elif images:
        _print_images(images, builder.seconds)
    for error in list(builder.failures.values())[1:]:
        say(f"minisandbox: {error.what}")
    if builder.failures:
        error = next(iter(builder.failures.values()))
        raise error.about(args.tasks) if is_recipe else error
    return exits.OK


def _recipe_of_file(args: argparse.Namespace) -> dict[str, Callable[[], Buildable]]:
    path = Path(args.tasks)
    recipe = read_recipe(path)
    if args.torch_backend:
        recipe = replace(_python(recipe), torch_backend=args.torch_backend)
    return {args.name or path.stem: lambda: recipe}


def _recipes_of_tasks(args: argparse.Namespace) -> dict[str, Callable[[], Buildable]]:
    return {task.instance_id: task.recipe for task in load(args)}


def _pinned_recipes(
    args: argparse.Namespace, recipes: dict[str, Callable[[], Buildable]]
) -> dict[str, Callable[[], Buildable]]:
    """Return the recipes with the command line's pins."""
    for option in ("exclude_newer", "torch_backend"):
        if args.locked is not None and getattr(args, option):
            other = option.replace("_", "-")
            raise InvalidValue(f"--locked and --{other} cannot be combined", hint=f"leave out --{other}")
    if args.locked is not None:
        if len(recipes) != 1:
            raise InvalidValue(f"--locked is for one image, not {len(recipes)}", hint="choose one with --only")
        return {name: partial(_locked, recipe, read_lock(args.locked)) for name, recipe in recipes.items()}
    if args.exclude_newer:
        return {name: partial(_dated, recipe, args.exclude_newer) for name, recipe in recipes.items()}
    return recipes


def _locked(recipe: Callable[[], Buildable], lock: Lock) -> PythonRecipe:
    plain = _python(recipe())
    python = lock.python.get("version", plain.python)
    return replace(plain, lock=lock, python=python, torch_backend=lock.torch_backend)


def _dated(recipe: Callable[[], Buildable], date: str) -> PythonRecipe:
    return replace(_python(recipe()), exclude_newer=date)


def _python(recipe: Buildable) -> PythonRecipe:
    """The recipe, if the package index decides what comes of it."""
    if not isinstance(recipe, PythonRecipe):
        raise InvalidValue(
            "the recipe has a base, whose steps choose their packages themselves",
            hint="leave out --locked, --exclude-newer and --torch-backend",
        )
    return recipe


def _budget(args: argparse.Namespace) -> Budget:
    memory = None if args.memory is None else parse_size(args.memory)
    return Budget(memory=memory) if args.jobs is None else Budget(args.jobs, memory)


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise InvalidValue(f"{path} is not a directory", hint="give one with clones: OWNER/NAME or OWNER__NAME")
    return path.absolute()


def run_show(args: argparse.Namespace) -> int:
    """Print one image."""
    image = load_image(Store.open(), args.name)
    if args.json:
        frozen = [layer.key for layer in image.records() if image.store.is_frozen(layer.key)]
        facts = {**_facts(image), "layers": image.records(), "frozen": frozen}
        print_json({**facts, "environment": dict(image.environment)})
        return exits.OK
    put(clean_line(f"{image.name}   {image.key}"))
    for note, text in image.notes.items():
        put(f"{note}: {text}")
    put(clean_line(f"workdir: {image.workdir}   commit: {image.commit or 'no repository'}"))
    for name, value in image.environment:
        put(clean_line(f"{name}={value}"))
    put()
    columns = ("layer", "key", "size", "files", "made in", "made")
    print_table(
        [Column(title, number=title in ("size", "files", "made in"), whole=True) for title in columns],
        [
            (
                _what(image, layer),
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


def _what(image: Image, layer: LayerRecord) -> str:
    tests = " (tests)" if layer.key == image.tests_layer else ""
    return str(layer.step.get("kind", "?")) + tests + (", frozen" if image.store.is_frozen(layer.key) else "")


def _facts(image: Image) -> dict[str, object]:
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


def _print_images(images: list[Image], built: dict[str, float]) -> None:
    sizes = image_sizes(images)
    columns = ["image", "layers", "shared", "unique", *(["built in"] if built else []), "python"]
    rows = []
    for image in images:
        size, seconds = sizes[image.name], built.get(image.name, 0.0)
        time_cell = [human_seconds(seconds) if seconds else "cached"] if built else []
        layers = str(len(image.records()))
        python = str(image.notes.get("python", ""))
        rows.append([image.name, layers, human_size(size.shared), human_size(size.unique), *time_cell, python])
    numbers = ("layers", "shared", "unique", "built in")
    print_table([Column(title, number=title in numbers, whole=title == "image") for title in columns], rows)
    put(f"\n{len(images)} images, {human_size(total_size(images))} in total")
