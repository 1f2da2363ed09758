"""Convert rows that pytest grades, and whose build follows from their columns or from a table in this module.

- SWE-Gym: SWE-bench's columns without ``environment_setup_commit``. The build specifications of SWE-Gym's harness are
  not published as a package. This module approximates them; exported environments (``--pins``) are more exact.
- SWE-rebench (Nebius): SWE-bench's columns, ``install_config``, and the exact ``requirements`` of each row.
- SWE-bench Pro: test lists with lower-case names, and an image with the repository in /app. The agent also gets
  ``requirements`` and ``interface``. The construction of the images is not published.
- The original MiniSandbox's custom datasets: SWE-smith's columns, and ``python_version`` (default 3.11),
  ``test_patch``, and the commands that the original reads from a source file. The repository at ``base_commit``
  already contains the bug of ``patch``. Without ``base_commit``, the branch with the name of the instance is used.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from minisandbox.errors import TaskFileError
from minisandbox.spec import PythonRecipe
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.corrections import sort_commands
from minisandbox.tasks.dialects.environments import OFFICIAL, chosen_build, full_commit, of_repository, specified
from minisandbox.tasks.fields import bad_field
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.languages import check_ids, not_python
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Form, Task

CUSTOM_INSTALL = ("install_cmds", "install_cmd", "custom_install_cmd")
CUSTOM_TEST = ("test_cmd", "custom_test_cmd")
_CUSTOM_PYTHON = "3.11"

_EDITABLE = "python -m pip install -e ."
# The interpreter and the install commands of SWE-Gym repositories for which the defaults do not work.
_GYM_PYTHON = "3.10"
_GYM: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "getmoto/moto": ("3.12", ("make init",)),
    "python/mypy": ("3.12", ("python -m pip install -r test-requirements.txt", _EDITABLE)),
    "facebookresearch/hydra": ("3.8", ("python -m pip install -r requirements/dev.txt", _EDITABLE)),
    "project-monai/monai": ("3.8", ("python -m pip install -r requirements-dev.txt", _EDITABLE)),
    "modin-project/modin": ("3.9", (_EDITABLE,)),
}
_TIMEOUT, _PRO_TIMEOUT = 1800.0, 3600.0


def swegym(row: RowFields, context: LoadContext) -> Task:
    """Convert a row of SWE-Gym; the pins are in ``REPOSITORY/NUMBER/*.yml``."""
    check_ids(row.test_lists()[0], "FAIL_TO_PASS")
    name, _, issue_number = row.text("instance_id").rpartition("-")
    repo, commit = row.text("repo"), row.text("base_commit")
    python, install = _GYM.get(repo.lower(), (_GYM_PYTHON, (_EDITABLE,)))
    build = chosen_build(
        "swegym",
        row.row,
        context,
        (name, issue_number),
        lambda: specified(python, ("pytest", "pytest-xdist"), ()),
        lambda pins: of_repository(pins, repo, commit, row.commands("install") or install),
    )
    return row.task(build, PytestGrader(timeout=_TIMEOUT))


def swerebench(row: RowFields, context: LoadContext) -> Task:
    """Convert a row of SWE-rebench; the row itself contains the pins."""
    config, requirements = row.nested("install_config"), row.requirements("requirements")
    python = str(config.row.get("python") or "")
    if not python:
        raise not_python("install_config", "has no 'python'")
    repo, commit = row.text("repo"), row.text("base_commit")

    def specification() -> PythonRecipe:
        return specified(
            python, requirements or ("pytest",), () if requirements else config.requirements("pip_packages")
        )

    def pinned(pins: PythonRecipe) -> PythonRecipe:
        setup = sort_commands([*config.commands("pre_install"), *config.commands("install")])
        return of_repository(pins, repo, commit, setup.remaining, system=setup.system)

    grader = PytestGrader(" && ".join(config.commands("test_cmd")) or "python -m pytest", _TIMEOUT)
    build = chosen_build("swe-rebench", row.row, context, (), specification, pinned, exact=bool(requirements))
    return row.task(build, grader)


def swebench_pro(row: RowFields, context: LoadContext) -> Task:
    """Convert a row of SWE-bench Pro."""
    lists = {name.upper(): _literals(row, name) for name in ("fail_to_pass", "pass_to_pass")}
    check_ids(lists["FAIL_TO_PASS"], "fail_to_pass")
    image = OFFICIAL["swebench-pro"].build(row.row)
    if image is None or context.environment == "pins":
        raise TaskFileError(
            "nothing but its image says what a row of SWE-bench Pro is built with",
            field="dockerhub_tag",
            hint="build it from its image: --environment image",
        )
    sections = [row.text("problem_statement")]
    for title, name in (("Requirements", "requirements"), ("New interfaces introduced", "interface")):
        if content := row.text(name, default="").strip():
            sections.append(f"{title}:\n{content}")
    grader, test_lists = PytestGrader(timeout=_PRO_TIMEOUT), RowFields(lists).test_lists()
    return row.task(image, grader, lists=test_lists, problem_statement="\n\n".join(sections))


def _literals(row: RowFields, name: str) -> list[str]:
    """Return a column's list of strings; the column may store the list as a Python literal in a string."""
    value = row.row.get(name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise bad_field(name, "is no list", reason=str(error)) from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad_field(name, "is not a list of strings")
    return value


def custom(row: RowFields, context: LoadContext) -> Task:
    """Convert a row of the original's custom datasets; the pins are in ``IMAGE/*.yml``."""
    repo = row.text("repo")
    revision = row.text("base_commit", default="") or row.text("instance_id")
    commit = full_commit(repo, revision, context.repo_mirrors, "base_commit")
    image = row.text("image_name", default="").rpartition("/")[2]
    python = row.text("python_version", default=_CUSTOM_PYTHON)
    requirements = row.requirements("requirements")

    def pinned(pins: PythonRecipe) -> PythonRecipe:
        pins = replace(pins, python=python) if "python_version" in row.row else pins
        return of_repository(pins, repo, commit, row.commands(*CUSTOM_INSTALL) or (_EDITABLE,))

    build = chosen_build(
        "custom",
        row.row,
        context,
        (image,) if image else (),
        lambda: specified(python, requirements or ("pytest",), ()),
        pinned,
        exact=True,  # the image column may contain a name without an image
    )
    return row.task(
        build,
        PytestGrader(" && ".join(row.commands(*CUSTOM_TEST)) or "python -m pytest"),
        form=Form.BUGGY,
        base_commit=commit,
        problem_statement=row.text("problem_statement", default=""),
    )
