"""Read a Dockerfile as a recipe, and find the container images that a recipe needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.images.dockerfile.evaluation import BuildOptions, Config, evaluate
from minisandbox.images.dockerfile.parsing import parse_dockerfile
from minisandbox.images.dockerfile.trees import open_context
from minisandbox.images.image import Image
from minisandbox.spec import (
    Buildable,
    Context,
    CopyFiles,
    DockerfileBase,
    OciBase,
    PythonRecipe,
    Recipe,
    RunCommand,
    StageBase,
)

_MOST = 4 << 20


def options_of(base: DockerfileBase) -> BuildOptions:
    """Return the build options of a Dockerfile that is the base of a recipe."""
    return BuildOptions(base.target or None, dict(base.args), base.platform)


def base_images(recipe: Buildable) -> Iterator[OciBase]:
    """Yield the container images that a recipe starts from and copies from, without pulling any image.

    Images whose names depend on variables of a base image are left out, because these variables are still unknown.
    """
    if isinstance(recipe, PythonRecipe):
        return
    base = recipe.base
    if isinstance(base, DockerfileBase):
        with suppress(MiniSandboxError):  # planning raises the error again
            text, files = _text(base.dockerfile), Context(base.context.resolve(), base.dockerfile.resolve())
            yield from base_images(evaluate(parse_dockerfile(text), options_of(base), lambda _: {}, files))
    yield from _images_of(base)
    for step in recipe.steps:
        if isinstance(step, CopyFiles):
            yield from _images_of(step.origin)
        elif isinstance(step, RunCommand):
            for mount in step.mounts:
                yield from _images_of(mount.origin)


def _images_of(source: object) -> Iterator[OciBase]:
    if isinstance(source, OciBase):
        yield source
    elif isinstance(source, StageBase):
        yield from base_images(source.recipe)


def evaluated(dockerfile: Path, context: Path, options: BuildOptions, container: Callable[[OciBase], Image]) -> Recipe:
    """Read a Dockerfile; see :func:`.builder.read_dockerfile`.

    Args:
        dockerfile: the path of the Dockerfile.
        context: the directory that COPY and ADD take files from.
        options: the stage, arguments, network and secrets.
        container: returns a base image, and pulls it if it is missing.
    """
    text = _text(dockerfile)
    files = Context(context.resolve(), dockerfile.resolve())
    open_context(files.root, files.dockerfile)  # raises an error if the directory is missing

    def config(base: OciBase) -> Config:
        image = container(base)
        rows = [f"{name}={value}" for name, value in image.environment]
        return {**image.config, "Env": rows, "WorkingDir": str(image.workdir)}

    return evaluate(parse_dockerfile(text), options, config, files)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST + 1)
    except OSError as error:
        raise InvalidValue(f"the Dockerfile {path} cannot be read", reason=error.strerror) from None
    if len(content) > _MOST:
        raise InvalidValue(f"{path} has more than {_MOST} bytes", hint="is it a Dockerfile?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is not UTF-8", reason=str(error), hint="is it a Dockerfile?") from None
