"""The task model and the set."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from tests.container import git

from minisandbox.errors import InvalidValue, NotFound, PatchError, TaskFileError
from minisandbox.spec import (
    CheckOut,
    CutHistory,
    DockerfileBase,
    HiddenTests,
    ImageSource,
    OciBase,
    PythonRecipe,
    Recipe,
    SdistSource,
)
from minisandbox.tasks import Build, ContainerBuild, Form, Task, TaskSet, bundled_sets, task_from_row

BUG = "--- a/src/x.py\n+++ b/src/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
TESTS = "--- a/tests/test_y.py\n+++ b/tests/test_y.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"


def make(**changes: object) -> Task:
    task = Task(
        instance_id="o__n-1",
        repo="o/n",
        base_commit="n==1.0",
        problem_statement="It is wrong.",
        patch=BUG,
        test_patch="",
        FAIL_TO_PASS=("tests/test_x.py::test_a[p::q]",),
        PASS_TO_PASS=("tests/test_z.py::test_b", "test_c (module.Class)"),
        form=Form.SWESMITH,
        build=PythonRecipe(
            python=">=3.11",
            requirements=("pytest==8.3.4",),
            source=SdistSource("n", "1.0", "0" * 64),
            install=("true",),
            environment=(("A", "b"),),
        ),
    )
    return dataclasses.replace(task, **changes)  # type: ignore[arg-type]


def test_row_and_back() -> None:
    task = make()
    row = task.to_row()
    assert task_from_row(row) == task
    assert task_from_row(json.loads(json.dumps(row))) == task
    assert task_from_row(row).to_row() == row


def test_changes_of_submodules_commits_are_dropped_as_git_apply_ignores_them(tmp_path: Path) -> None:
    project, clean = tmp_path / "project", tmp_path / "clean"
    project.mkdir()
    git(project, "init", "--quiet")
    for name, number in (("changed", "1"), ("removed", "1")):
        git(project, "update-index", "--add", "--cacheinfo", f"160000,{number * 40},{name}")
    (project / "a.py").write_text("a = 1\n")
    git(project, "add", "a.py")
    git(project, "commit", "--quiet", "-m", "base")
    git(tmp_path, "clone", "--quiet", str(project), str(clean))
    git(project, "update-index", "--force-remove", "removed")
    for name in ("changed", "added"):
        git(project, "update-index", "--add", "--cacheinfo", f"160000,{'2' * 40},{name}")
    (project / "a.py").write_text("a = 2\n")
    git(project, "add", "a.py")
    patch, expected = (git(project, "diff", "--cached", *paths) + "\n" for paths in ((), ("a.py",)))
    assert patch.count("Subproject commit") == 4
    task = task_from_row({**make().to_row(), "form": "swebench", "patch": patch, "test_patch": patch})
    assert task.patch == task.test_patch == expected
    subprocess.run(["git", "apply"], cwd=clean, input=patch.encode(), check=True)
    assert {path.name for path in clean.iterdir()} == {".git", "a.py", "added", "changed"}
    assert (clean / "a.py").read_text() == "a = 2\n"
    assert not any((clean / "changed").iterdir())


BUILDS = (
    ContainerBuild(OciBase("ghcr.io/o/n:1")),
    ContainerBuild(
        OciBase("o/n", "linux/arm64"), workdir="/app", environment=(("A", "b"),), cut=False, reset=False, remove=("/x",)
    ),
    ContainerBuild(DockerfileBase(Path("/tasks/one/Dockerfile"), Path("/tasks/one"))),
    ContainerBuild(
        DockerfileBase(Path("/d/File"), Path("/d/context"), (("V", "1"),), "test", "linux/arm64"), workdir="/app"
    ),
)


@pytest.mark.parametrize("build", BUILDS)
def test_builds_of_images_and_back(build: Build) -> None:
    task = make(build=build)
    row = json.loads(json.dumps(task.to_row()))
    assert task_from_row(row) == task
    assert {build: 1}[task_from_row(row).build] == 1


def test_paths_of_builds_start_at_the_file(tmp_path: Path) -> None:
    row = make().to_row()
    task = task_from_row({**row, "build": {"dockerfile": "env/Dockerfile"}}, base=tmp_path)
    assert task.build == ContainerBuild(DockerfileBase(tmp_path / "env/Dockerfile", tmp_path / "env"))
    layout = task_from_row({**row, "build": {"image": "oci:images:v1"}}, base=tmp_path)
    assert layout.build == ContainerBuild(OciBase(f"oci:{tmp_path}/images:v1"))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        ({"image": "x", "python": "3.11"}, "build.python"),
        ({"image": ""}, "build.image"),
        ({"image": "UPPER/case"}, "build.image"),
        ({"image": "x", "workdir": "app"}, "build.workdir"),
        ({"image": "x", "workdir": "/"}, "build.workdir"),
        ({"image": "x", "remove": ["../x"]}, "build.remove"),
        ({"image": "x", "environment": {"A=": "x"}}, "build.environment"),
        ({"image": "x", "cut": "no"}, "build.cut"),
        ({"image": "x", "dockerfile": "y"}, "build.image"),
        ({"dockerfile": "x", "args": ["A"]}, "build.args"),
    ],
)
def test_builds_of_images_that_cannot_be_used(build: object, field: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        task_from_row({**make().to_row(), "build": build})
    assert caught.value.field == field


def test_a_recipe_over_an_image_resets_hides_and_cuts() -> None:
    commit = "0" * 40
    recipe = make(build=ContainerBuild(OciBase("o/n"), workdir="/app", remove=("/x",)), base_commit=commit).recipe()
    assert isinstance(recipe, Recipe)
    hidden = ("tests/test_x.py",)
    steps = (CheckOut(ImageSource(commit, ("/x",))), HiddenTests(hidden), CutHistory(BUG, hidden))
    assert recipe == Recipe(OciBase("o/n"), steps, workdir=PurePosixPath("/app"))
    unchanged = make(build=ContainerBuild(OciBase("o/n"), reset=False), base_commit=commit, form=Form.SWEBENCH).recipe()
    assert unchanged == Recipe(OciBase("o/n"), (CheckOut(ImageSource()), CutHistory()))
    plain = make(build=ContainerBuild(DockerfileBase(Path("/d/F"), Path("/d")), cut=False)).recipe()
    assert plain == Recipe(DockerfileBase(Path("/d/F"), Path("/d")))


def test_a_task_can_be_a_key_and_does_not_change() -> None:
    task = make()
    assert {task: 1}[make()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.repo = "x"  # type: ignore[misc]


def test_reference_and_files_of_a_bug() -> None:
    task = make()
    assert task.reference.reverse
    assert task.test_files == ("tests/test_x.py", "tests/test_z.py")
    assert task.hidden_files == ("tests/test_x.py",)


def test_reference_and_files_of_a_fix() -> None:
    task = make(form=Form.SWEBENCH, test_patch=TESTS)
    assert not task.reference.reverse
    assert task.test_files == ("tests/test_x.py", "tests/test_y.py", "tests/test_z.py")
    assert task.hidden_files == ()


def test_doctests_do_not_make_the_source_a_test_file() -> None:
    task = make(FAIL_TO_PASS=("src/x.py::x.f", "tests/test_x.py::test_a"))
    assert task.hidden_files == ("tests/test_x.py",)
    assert "src/x.py" not in task.test_files


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"instance_id": "a/b"}, "instance_id"),
        ({"instance_id": ".a"}, "instance_id"),
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": "a\nb"}, "instance_id"),
        ({"instance_id": "a b"}, "instance_id"),
        ({"instance_id": "-a"}, "instance_id"),
        ({"instance_id": "a" * 201}, "instance_id"),
        ({"FAIL_TO_PASS": ()}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": ("a::b", "a::b")}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": ("",)}, "FAIL_TO_PASS"),
        ({"PASS_TO_PASS": ("tests/test_x.py::test_a[p::q]",)}, "PASS_TO_PASS"),
        ({"patch": " "}, "patch"),
        ({"test_patch": TESTS}, "test_patch"),
    ],
)
def test_values_that_cannot_be_used(changes: dict[str, object], field: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        make(**changes)
    assert caught.value.field == field
    assert caught.value.hint


def test_an_unsafe_patch_is_a_patch_error() -> None:
    with pytest.raises(PatchError, match="field 'patch', line 1"):
        make(patch=BUG.replace("src/x.py", "../x.py"))


@pytest.fixture
def three() -> TaskSet:
    return TaskSet((make(instance_id=name) for name in ("b-1", "a-1", "a-2")), name="three")


def test_a_set_is_ordered(three: TaskSet) -> None:
    assert three.ids == ("b-1", "a-1", "a-2") == tuple(task.instance_id for task in three)
    assert len(three) == 3
    assert three["a-1"].instance_id == "a-1"
    assert "a-1" in three
    assert "x" not in three


def test_a_set_has_each_id_once() -> None:
    with pytest.raises(InvalidValue, match="'o__n-1'"):
        TaskSet([make(), make()])


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["a-*"], ("a-1", "a-2")),
        (["a-1", "b-1"], ("b-1", "a-1")),
        (["a-[2]"], ("a-2",)),
        (["?-[1]"], ("b-1", "a-1")),
        ("b-1", ("b-1",)),
        ([], ()),
    ],
)
def test_select(three: TaskSet, patterns: list[str] | str, chosen: tuple[str, ...]) -> None:
    assert three.select(patterns).ids == chosen


def test_unknown_ids_are_named_with_near_ones(three: TaskSet) -> None:
    with pytest.raises(NotFound, match=r"'a-3'.*a-1"):
        three["a-3"]
    with pytest.raises(NotFound, match=r"'c\*'"):
        three.select(["a-1", "c*"])
    with pytest.raises(LookupError):
        three["z"]


def test_a_set_is_written_and_read(three: TaskSet, tmp_path: Path) -> None:
    path = tmp_path / "three.jsonl"
    path.write_text(three.to_jsonl(), encoding="utf-8")
    again = TaskSet.load(path)
    assert again == three
    assert again.name == "three"
    assert TaskSet.load(str(path)) == three


def test_bundled_names_win_and_unknown_names_list_them() -> None:
    assert isinstance(bundled_sets(), tuple)
    with pytest.raises(TaskFileError, match="nothing-of-this-name"):
        TaskSet.load("nothing-of-this-name")
