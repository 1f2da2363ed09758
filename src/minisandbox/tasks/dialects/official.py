"""The container images that data sets publish for their rows, and when a row is built from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minisandbox.errors import TaskFileError
from minisandbox.tasks.builds import Build, ImageBuild, PythonBuild
from minisandbox.tasks.context import LoadContext

_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TESTBED = "/opt/miniconda3/envs/testbed"
_CONDA = (
    ("CONDA_DEFAULT_ENV", "testbed"),
    ("CONDA_PREFIX", _TESTBED),
    ("PATH", f"{_TESTBED}/bin:/opt/miniconda3/bin:{_SYSTEM}"),
)

_NAMES = ("docker_image", "image_name")


@dataclass(frozen=True, slots=True)
class OfficialImage:
    """How a data set's rows name their images, and what is in these.

    Attributes:
        columns: columns that hold the reference; the first that has one counts.
        template: the reference of a row without such a column, with ``{id}``; "" where only a column says it. A column
            of a bare tag is completed by it, with ``{tag}``.
        underscores: what stands for ``__`` of an id: names of repositories have none.
        workdir: where the repository lies; "" for the image's own workdir.
        environment: variables, which activate the environment of the tests.
        reset: whether the repository may be at another commit than the row's.
        remove: tests and answers outside of the repository, and untracked ones in it.
    """

    columns: tuple[str, ...]
    template: str = ""
    underscores: str = "__"
    workdir: str = "/testbed"
    environment: tuple[tuple[str, str], ...] = ()
    reset: bool = False
    remove: tuple[str, ...] = ()

    def build(self, row: Mapping[str, object]) -> ImageBuild | None:
        """Return the image of a row, or None where nothing names it."""
        named = next((value for name in self.columns if (value := row.get(name)) and isinstance(value, str)), "")
        if "{tag}" in self.template:
            reference = self.template.format(tag=named) if named else ""
        else:
            identity = str(row.get("instance_id") or "").lower().replace("__", self.underscores)
            reference = named or self.template.format(id=identity)
        if not reference:
            return None
        return ImageBuild(
            reference, workdir=self.workdir, environment=self.environment, reset=self.reset, remove=self.remove
        )


OFFICIAL: Mapping[str, OfficialImage] = {
    "swebench": OfficialImage(("image",), "swebench/sweb.eval.x86_64.{id}", "_1776_", environment=_CONDA),
    "swesmith": OfficialImage(("image_name",), environment=_CONDA),
    "swegym": OfficialImage(
        ("docker_image", "image_name"), "xingyaoww/sweb.eval.x86_64.{id}", "_s_", environment=_CONDA
    ),
    "swe-rebench": OfficialImage(
        ("docker_image", "image_name"), "swerebench/sweb.eval.x86_64.{id}", "_1776_", environment=_CONDA
    ),
    "r2e": OfficialImage(
        ("docker_image",),
        environment=(("PATH", f"/testbed/.venv/bin:{_SYSTEM}"),),
        remove=("/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh"),
    ),
    "swebench-pro": OfficialImage(("dockerhub_tag",), "jefzda/sweap-images:{tag}", workdir="/app", reset=True),
    "custom": OfficialImage(("image_name",), workdir=""),
}
"""The images by the names of the layouts."""


def chosen_build(
    layout: str, row: Mapping[str, object], context: LoadContext, pinned: Callable[[], PythonBuild], *, exact: bool
) -> Build:
    """Choose how a row is built, as :attr:`.LoadContext.environment` says.

    Args:
        layout: the name of the row's layout.
        row: the row.
        context: how to choose.
        pinned: returns the build from pins or from a specification.
        exact: whether there are exact pins for the row.

    Raises:
        TaskFileError: it has to be an image, and nothing names one; or ``pinned`` raises it.
    """
    if context.environment == "pins" or (context.environment == "auto" and exact):
        return pinned()
    image = OFFICIAL[layout].build(row)
    if image is not None:
        return image
    if context.environment == "image":
        columns = OFFICIAL[layout].columns
        raise TaskFileError(
            f"no column names the image of {row.get('instance_id')!r}",
            field=columns[0],
            hint=f"add {' or '.join(columns)}, or build from pins: --environment pins",
        )
    return pinned()
