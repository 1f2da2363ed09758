"""How a task's image is made: from pins, from a container image, or from a Dockerfile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from minisandbox.tasks.fields import keys_of, object_of

if TYPE_CHECKING:
    from minisandbox.images import PythonRecipe, Recipe, Source
    from minisandbox.images.recipe import Base


@dataclass(frozen=True, slots=True)
class TaskContent:
    """What a task puts into its image, however that is built.

    Attributes:
        commit: the commit that the repository is at; "" if the row names no commit.
        version: the version of the project; "" for unknown.
        patch: applied before the agent gets the repository.
        hidden: paths that only graders see.
        test_patch: the hidden tests' patch.
    """

    commit: str = ""
    version: str = ""
    patch: str = ""
    hidden: tuple[str, ...] = ()
    test_patch: str = ""


_NOTHING = TaskContent()


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where a task's repository comes from, as its row says it.

    Attributes:
        kind: ``"sdist"``, ``"git"`` or ``"local"``.
        fields: the row's own keys and values: ``name``, ``version``, ``sha256``; ``url``, ``commit``; or ``path``.
        within: the directories that a ``path`` must not leave, as :class:`.LocalSource` has them; no part of the row.
    """

    kind: str
    fields: tuple[tuple[str, str], ...]
    within: tuple[Path, ...] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def on_github(cls, repo: str, commit: str) -> SourceSpec:
        """Return a commit of a repository that is called ``owner/name`` there."""
        return cls("git", (("url", github(repo)), ("commit", commit)))

    def to_row(self) -> dict[str, object]:
        """Return it as a row has it under ``build.source``."""
        return {self.kind: dict(self.fields)}

    def source(self) -> Source:
        """Return it as the images package wants it."""
        from minisandbox import images  # noqa: PLC0415 - reading task files must not load the sandbox

        values = dict(self.fields)
        if self.kind == "sdist":
            return images.SdistSource(**values)
        if self.kind == "git":
            return images.GitSource(**values)
        return images.LocalSource(Path(values["path"]), self.within)


@dataclass(frozen=True, slots=True)
class PythonBuild:
    """A repository installed into a Python environment of pinned packages, over the host's ``/usr``.

    Attributes:
        python: the interpreter asked for: "3.11", "3.11.7", ">=3.11"; None for no more than the host's /usr.
        requirements: pinned packages, installed before the source is there, so that tasks can share them.
        complete: whether ``requirements`` name everything that is to be installed with them.
        overrides: packages installed after the requirements; they win.
        source: the repository, or None for an empty one.
        install: shell commands run at /testbed.
        environment: variables captured in the image.
        network: what the install commands reach: "off", "index" (the package index) or "host".
        exclude_newer: a date: packages uploaded later are not there; "" for all.
        system: packages of the host's distribution; takes root.
        torch_backend: "cpu": builds of PyTorch without CUDA, whatever the requirements say; "" for those they name.
    """

    python: str | None = None
    requirements: tuple[str, ...] = ()
    complete: bool = False
    overrides: tuple[str, ...] = ()
    source: SourceSpec | None = None
    install: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    network: str = "index"
    exclude_newer: str = ""
    system: tuple[str, ...] = ()
    torch_backend: str = ""

    def recipe(self, content: TaskContent = _NOTHING) -> PythonRecipe:
        """Return the recipe of the image with what a task adds."""
        from minisandbox.images import PythonRecipe  # noqa: PLC0415 - reading task files must not load the sandbox

        same: dict[str, Any] = {name: getattr(self, name) for name in keys_of(PythonBuild)}
        from_git = self.source is not None and self.source.kind == "git"  # archives say their version
        return PythonRecipe(
            **{**same, "source": None if self.source is None else self.source.source()},
            version=content.version if from_git else "",
            patch=content.patch,
            hidden=content.hidden,
            test_patch=content.test_patch,
        )

    def to_row(self) -> dict[str, object]:
        """Return it as a row has it under ``build``."""
        return object_of(self, ("python", "requirements", "source", "install", "environment"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerBuild:
    """What a task makes of a container image and of the repository in it.

    Attributes:
        workdir: the directory of the repository, where commands start; "" for the image's own.
        environment: variables over the image's own.
        cut: whether the files there become a git repository of one commit; without one, no submission is a patch.
        reset: whether the files are reset to the task's base commit where the image's HEAD is another one.
        remove: absolute paths of the image that no agent may see, such as tests outside of the repository.
    """

    workdir: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    cut: bool = True
    reset: bool = True
    remove: tuple[str, ...] = ()

    def _over(self, base: Base, content: TaskContent) -> Recipe:
        """Return the recipe of a task's image over a base."""
        from minisandbox.images import recipe as r  # noqa: PLC0415 - reading task files must not load the sandbox

        commit = content.commit if self.reset and r.is_commit(content.commit) else ""
        steps: list[r.Step] = []
        if self.cut or self.remove:
            steps.append(r.CheckOut(r.ImageSource(commit, self.remove)))
        if self.cut:
            if content.hidden or content.test_patch.strip():
                steps.append(r.HiddenTests(content.hidden, content.test_patch))
            steps.append(r.CutHistory(content.patch, content.hidden))
        return r.Recipe(base, tuple(steps), self.environment, PurePosixPath(self.workdir) if self.workdir else None)


@dataclass(frozen=True, slots=True)
class ImageBuild(ContainerBuild):
    """A container image that has the repository and everything installed.

    Attributes:
        reference: as :func:`minisandbox.images.pull` takes it; an image of the store is not pulled again.
        platform: such as ``linux/arm64``; "" for this machine's.
    """

    reference: str
    platform: str = ""

    def recipe(self, content: TaskContent = _NOTHING) -> Recipe:
        """Return the recipe of the image with what a task adds."""
        from minisandbox.images import OciBase  # noqa: PLC0415 - reading task files must not load the sandbox

        return self._over(OciBase(self.reference, self.platform), content)

    def to_row(self) -> dict[str, object]:
        """Return it as a row has it under ``build``."""
        row = object_of(self)
        return {"image": row.pop("reference"), **row}


@dataclass(frozen=True, slots=True)
class DockerfileBuild(ContainerBuild):
    """An image built from a Dockerfile.

    Attributes:
        dockerfile: its path.
        context: the directory that COPY and ADD take files from.
        args: values of its arguments (``--build-arg``).
        target: the stage; "" for the last one.
        platform: such as ``linux/arm64``; "" for this machine's.
    """

    dockerfile: Path
    context: Path
    args: tuple[tuple[str, str], ...] = ()
    target: str = ""
    platform: str = ""

    def recipe(self, content: TaskContent = _NOTHING) -> Recipe:
        """Return the recipe of the image with what a task adds."""
        from minisandbox.images import DockerfileBase  # noqa: PLC0415 - reading task files must not load the sandbox

        base = DockerfileBase(self.dockerfile, self.context, self.args, self.target, self.platform)
        return self._over(base, content)

    def to_row(self) -> dict[str, object]:
        """Return it as a row has it under ``build``."""
        return object_of(self)


Build = PythonBuild | ImageBuild | DockerfileBuild
"""How a task's image is made."""


def github(repo: str) -> str:
    """Return the address of a repository that is called ``owner/name``."""
    return f"https://github.com/{repo}"
