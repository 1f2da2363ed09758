"""``minisandbox image build``: build images, and repair a failed build by hand."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import (
    Progress,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    raise_failures,
    require_positive,
    say,
)
from minisandbox.cli.image import dockerfile
from minisandbox.cli.image.listing import image_facts
from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.images import Budget, Image, image_sizes, read_lock, repair, total_size
from minisandbox.spec import Buildable, Lock, PythonRecipe
from minisandbox.store import Store
from minisandbox.values import human_size, parse_size

KEPT = "finished layers are kept; the same command resumes"
_OF_DOCKERFILES = {
    "-f", "--file", "--name", "--build-arg", "--target", "--platform", "--secret", "--network", "--json",
}  # fmt: skip
"""Options of a build of one Dockerfile, which needs no code that reads task sets."""


def add_build_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Declare the options of ``build``; leave out those for task sets if ``arguments`` only build a Dockerfile."""
    parser.description = "Build the images of tasks, of a recipe (a .toml file) or of a Dockerfile (--file)."
    options = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    if options & {"-f", "--file"} and options <= _OF_DOCKERFILES:
        parser.add_argument("tasks", metavar="CONTEXT")
        parser.set_defaults(only=[], jobs=None, repo_mirrors=None, torch_backend="")
    else:
        from minisandbox.cli.common import task_sets  # noqa: PLC0415 - slow to import

        task_sets.add_tasks_arguments(parser)
        task_sets.add_jobs_option(parser)
    parser.add_argument("--name", help="the name of the recipe's image (default: the file's name)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory for all build steps together, such as 16G; each gets up to 4G of it"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="retry steps of tasks that failed in an earlier build"
    )
    parser.add_argument(
        "--shell",
        action="store_true",
        help="open a shell where the build fails; if its exit status is 0, its changes become a layer and the build "
        "continues. Without a terminal, commands are read from stdin",
    )
    parser.add_argument(
        "--locked", metavar="LOCK", type=Path, help="build from exactly the files of a lock (`image pins --lock`)"
    )
    parser.add_argument(
        "--exclude-newer", metavar="DATE", help="ignore packages uploaded on this day or later, such as 2024-03-01"
    )
    dockerfile.add_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run_build, kept=KEPT)


def run_build(args: argparse.Namespace) -> int:
    """Build images; a failure does not stop the other builds, and the first failure sets the exit status."""
    require_positive(args, "jobs")
    is_recipe = args.file is not None or args.tasks.endswith(".toml")
    recipes = _recipes(args, is_recipe=is_recipe)
    mirrors = None if args.repo_mirrors is None else _directory(args.repo_mirrors)
    store = Store.open()
    with Progress() as progress:
        builder = Builder(store, progress, mirrors)
        images = builder.build_recipes(recipes, _budget(args), retry_failed=is_recipe or args.retry_failed)
    if args.shell and builder.failures and _repaired(store, builder.failures):
        with Progress() as progress:
            builder = Builder(store, progress, mirrors)
            images = builder.build_recipes(recipes, _budget(args))
    if args.json:
        seconds = builder.seconds
        print_json([{**image_facts(image), "built_in": seconds.get(name, 0.0)} for name, image in images.items()])
    elif images:
        _print_images(list(images.values()), builder.seconds)
    if is_recipe and builder.failures:
        raise next(iter(builder.failures.values())).about(args.tasks)
    raise_failures(builder.failures)
    return exits.OK


def _recipes(args: argparse.Namespace, *, is_recipe: bool) -> Mapping[str, Callable[[], Buildable]]:
    """Return functions that return the recipes on the command line, by image name."""
    if is_recipe and args.only:
        raise InvalidValue("--only selects tasks, and a recipe has none", hint="leave it out")
    if args.name and not is_recipe:
        raise InvalidValue("--name is for a recipe's image", hint="images of tasks are named after their ids")
    if args.file is not None:
        return dockerfile.recipes(args, Store.open())
    recipes = _pinned_recipes(args, _recipe_of_file(args) if is_recipe else _recipes_of_tasks(args))
    if args.shell and len(recipes) != 1:
        raise InvalidValue(f"--shell is for one image, not {len(recipes)}", hint="choose one with --only")
    return recipes


def _repaired(store: Store, failures: Mapping[str, MiniSandboxError]) -> bool:
    """Open a shell in the failed build if a step failed; return whether to build again."""
    [(image, error)] = failures.items()
    if image not in {failure.image for failure in store.failures()}:
        return False
    say(f"minisandbox: {error.what}")
    return _repair_by_hand(store, image)


def _repair_by_hand(store: Store, image: str) -> bool:
    """Open a shell on the layers below a failed step; return whether its changes became a layer.

    The next build of the image uses that layer. The changes are dropped if the shell's exit status is not 0.
    """
    from minisandbox.cli.common.streams import follow, has_terminal, window  # noqa: PLC0415 - slow to import

    terminal = has_terminal()
    with repair.open_failed(store, image) as work:
        failure = work.failure
        if terminal:
            say(
                f"minisandbox: at step {failure.step!r} of {image}, which failed: {failure.reason.splitlines()[0]}",
                f"the step's log: {store.log_path(failure.key)}",
                "exit 0 keeps the changes and continues the build; any other status drops them",
            )
        env = {**work.environment, "TERM": os.environ.get("TERM", "xterm")}
        command = ["/bin/sh" if failure.own_root else "bash"]
        pty = window() if terminal else None
        with work.box.start(command, cwd=failure.workdir, env=env, pty=pty) as process:
            status = follow(process, stdin=True, terminal=terminal)
        if status:
            say(f"minisandbox: the shell ended with status {status}: its changes were dropped")
            return False
        say(f"minisandbox: kept as layer {work.keep().key[:16]}")
    return True


def _recipe_of_file(args: argparse.Namespace) -> dict[str, Callable[[], Buildable]]:
    from minisandbox.tasks import read_recipe  # noqa: PLC0415 - slow to import

    path = Path(args.tasks)
    recipe = read_recipe(path)
    if args.torch_backend:
        recipe = replace(_python(recipe), torch_backend=args.torch_backend)
    return {args.name or path.stem: lambda: recipe}


def _recipes_of_tasks(args: argparse.Namespace) -> dict[str, Callable[[], Buildable]]:
    from minisandbox.cli.common.task_sets import load  # noqa: PLC0415 - slow to import

    return {task.instance_id: task.recipe for task in load(args)}


def _pinned_recipes(
    args: argparse.Namespace, recipes: dict[str, Callable[[], Buildable]]
) -> dict[str, Callable[[], Buildable]]:
    """Return the recipes with the pins that the command line sets."""
    for option in ("exclude_newer", "torch_backend"):
        if args.locked is not None and getattr(args, option):
            flag = f"--{option.replace('_', '-')}"
            raise InvalidValue(f"--locked and {flag} cannot be combined", hint=f"leave out {flag}")
    if args.locked is not None:
        if len(recipes) != 1:
            raise InvalidValue(f"--locked is for one image, not {len(recipes)}", hint="choose one with --only")
        return {name: partial(_locked, recipe, read_lock(args.locked)) for name, recipe in recipes.items()}
    if args.exclude_newer:
        return {name: partial(_dated, recipe, args.exclude_newer) for name, recipe in recipes.items()}
    return recipes


def _locked(recipe: Callable[[], Buildable], lock: Lock) -> PythonRecipe:
    python_recipe = _python(recipe())
    python = lock.python.get("version", python_recipe.python)
    return replace(python_recipe, lock=lock, python=python, torch_backend=lock.torch_backend)


def _dated(recipe: Callable[[], Buildable], date: str) -> PythonRecipe:
    return replace(_python(recipe()), exclude_newer=date)


def _python(recipe: Buildable) -> PythonRecipe:
    """Return the recipe if it installs packages from an index.

    Raises:
        InvalidValue: the recipe has a base image, whose steps choose their packages themselves.
    """
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


def _print_images(images: list[Image], build_seconds: dict[str, float]) -> None:
    sizes = image_sizes(images)
    titles = ("image", "layers", "shared", "unique", "built in", "python")
    rows = []
    for image in images:
        size, seconds = sizes[image.name], build_seconds.get(image.name, 0.0)
        build_time = human_seconds(seconds) if seconds else "cached"
        layers, python = str(len(image.records())), str(image.notes.get("python", ""))
        rows.append((image.name, layers, human_size(size.shared), human_size(size.unique), build_time, python))
    print_table(titles, rows, numbers=("layers", "shared", "unique", "built in"), unwrapped=["image"])
    put(f"\n{len(images)} images, {human_size(total_size(images))} in total")
