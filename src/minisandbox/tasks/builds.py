"""Describe how a task's image is built: from pins, a container image, or a Dockerfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from minisandbox.spec import (
    CheckOut,
    CutHistory,
    DockerfileBase,
    GitSource,
    HiddenTests,
    ImageSource,
    LocalSource,
    OciBase,
    PythonRecipe,
    Recipe,
    SdistSource,
    Source,
    Step,
    is_commit,
)  # fmt: skip
from minisandbox.tasks.fields import object_of


@dataclass(frozen=True, slots=True)
class ContainerBuild:
    """A container image with the repository and its dependencies, which is pulled or built from a Dockerfile.

    Attributes:
        base: the image; it is pulled only if the store does not contain it.
        workdir: the directory of the repository, where commands start; "" for the image's working directory.
        environment: variables that are added to the image's, or replace them.
        cut: whether the repository's history is replaced by a single commit, against which submissions are diffed.
        reset: whether the files are reset to the task's base commit if the image's HEAD is a different commit.
        remove: absolute paths hidden from agents, such as tests outside the repository.
    """

    base: OciBase | DockerfileBase
    workdir: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    cut: bool = True
    reset: bool = True
    remove: tuple[str, ...] = ()

    def recipe(self, commit: str, patch: str, hidden: tuple[str, ...], test_patch: str) -> Recipe:
        """Return the recipe of a task's image.

        Args:
            commit: the repository's commit; "" if the row has none.
            patch: the patch that is applied before the agent gets the repository.
            hidden: paths that only graders can see.
            test_patch: the patch that adds the hidden tests.
        """
        steps: list[Step] = []
        if self.cut or self.remove:
            target = commit if self.reset and is_commit(commit) else ""
            steps.append(CheckOut(ImageSource(target, self.remove)))
        if self.cut:
            if hidden or test_patch.strip():
                steps.append(HiddenTests(hidden, test_patch))
            steps.append(CutHistory(patch, hidden))
        workdir = PurePosixPath(self.workdir) if self.workdir else None
        return Recipe(self.base, tuple(steps), self.environment, workdir)


Build = PythonRecipe | ContainerBuild
"""The build of a task's image: from Python pins or from a container image."""


PYTHON_KEYS = (
    "python", "requirements", "complete", "overrides", "source", "install", "environment", "network", "exclude_newer",
    "system", "torch_backend",
)  # fmt: skip
"""The keys of a row's ``build`` for a :class:`.PythonRecipe`."""
CONTAINER_KEYS = ("platform", "workdir", "environment", "cut", "reset", "remove")
"""The keys for a :class:`ContainerBuild`, besides ``image`` or the :data:`DOCKERFILE_KEYS`."""
DOCKERFILE_KEYS = ("dockerfile", "context", "args", "target")
SOURCES: Mapping[str, type[SdistSource | GitSource | LocalSource]] = {
    "sdist": SdistSource,
    "git": GitSource,
    "local": LocalSource,
}
"""The types of sources, by their key in a row's ``build.source``."""


def build_row(build: Build) -> dict[str, object]:
    """Return a build as the value of a row's ``build``."""
    if isinstance(build, PythonRecipe):
        row = object_of(build, ("python", "requirements", "source", "install", "environment"))
        return {**{key: row[key] for key in PYTHON_KEYS if key in row}, "source": source_row(build.source)}
    base, fields = object_of(build.base), object_of(build)
    del fields["base"]
    if isinstance(build.base, OciBase):
        return {"image": base.pop("reference"), **base, **fields}
    return base | fields


def source_row(source: Source | None) -> dict[str, object] | None:
    """Return a source as the value of a row's ``build.source``."""
    for kind, cls in SOURCES.items():
        if isinstance(source, cls):
            fields = object_of(source)
            fields.pop("within", None)
            return {kind: fields}
    return None


def github(repo: str) -> str:
    """Return the URL of the GitHub repository ``owner/name``."""
    return f"https://github.com/{repo}"
