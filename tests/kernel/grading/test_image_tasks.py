"""Tasks whose image is a container's: its own Python at another prefix, the repository at /app, with the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import make_once
from tests.container import ENVIRONMENT, commit, git, write_layout, write_root
from tests.kernel.grading.conftest import FILES, FIX, TEST_PATCH

from minisandbox import Sandbox
from minisandbox.grade import Status, Verdict, grade, validate
from minisandbox.grade.leaks import find_leaks
from minisandbox.images import Image, build
from minisandbox.spec import DockerfileBase, OciBase
from minisandbox.store import Store
from minisandbox.tasks import ContainerBuild, Form, PytestGrader, Task

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def layout(shared: Path) -> Path:
    """The container image: programs in one layer, the repository in the next; HEAD has the answer."""

    def write(place: Path) -> None:
        programs, app = place / "programs", place / "project/app"
        programs.mkdir(parents=True)
        app.mkdir(parents=True)
        write_root(programs)
        for name, text in FILES.items():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text)
        git(app, "init", "--quiet", "--initial-branch=main")
        (place / "base").write_text(commit(app, "base"))
        for patch in (FIX, TEST_PATCH):
            subprocess.run(["git", "-C", app, "apply", "-"], input=patch.encode(), check=True)
        commit(app, "the fix and its tests")
        (app / "build").mkdir()
        (app / "build/untracked").write_text("x")
        write_layout(place / "layout", programs, place / "project", environment=ENVIRONMENT)

    return make_once(shared / "container", write)


@pytest.fixture
def task(layout: Path) -> Task:
    """The task of the fix."""
    return Task(
        instance_id="calc__image-1",
        repo="example/calc",
        base_commit=(layout / "base").read_text(),
        problem_statement="there is no triple()",
        patch=FIX,
        test_patch=TEST_PATCH,
        FAIL_TO_PASS=("tests/test_double.py::test_triple",),
        PASS_TO_PASS=("tests/test_double.py::test_double", "tests/test_new.py::test_new"),
        form=Form.SWEBENCH,
        build=ContainerBuild(OciBase(f"oci:{layout}/layout")),
        grader=PytestGrader(timeout=60.0),
    )


@pytest.fixture
def image(task: Task, store: Store) -> Image:
    return build(task.recipe(), store=store, name=task.instance_id)


def test_an_image_task_is_valid_and_an_empty_submission_fails(task: Task, image: Image) -> None:
    assert image.own_root
    assert str(image.workdir) == "/app"
    assert validate(task, image).status is Status.VALID
    assert grade(task, image, b"").verdict is Verdict.FAILED
    graded = grade(task, image, FIX.encode())
    assert (graded.verdict, graded.resolved) == (Verdict.RESOLVED, True)
    wrong = grade(task, image, FIX.replace("3 * a", "4 * a").encode())
    assert (wrong.verdict, wrong.resolved) == (Verdict.FAILED, False)


def test_an_agent_sees_the_base_commit_alone(image: Image) -> None:
    with Sandbox.create(image.spec()) as box:
        assert "triple" not in box.exec("cat calc/core.py; git log --all -p").stdout
        assert box.exec("git rev-list --all --count; git status --porcelain").stdout == "1\n"
        assert box.exec("ls build").stdout == "untracked\n"
        assert box.exec("python -c 'import sys; print(sys.prefix)'").stdout == "/opt/own\n"
        box.files.write_text("calc/more.py", "x = 1\n")
        assert b"calc/more.py" in box.patch()
    assert image.tests_dir() is not None


def test_a_fix_inside_a_submodule_is_submitted_and_graded(
    task: Task, store: Store, layout: Path, tmp_path: Path
) -> None:
    library, app = tmp_path / "library", tmp_path / "project/app"
    for folder, names in ((library, ("calc",)), (app, ("tests", "setup.cfg"))):
        folder.mkdir(parents=True)
        git(folder, "init", "--quiet", "--initial-branch=main")
        for name, text in FILES.items():
            if name.startswith(names):
                path = folder / name.removeprefix("calc/")
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
        commit(folder, "base")
    git(app, "submodule", "--quiet", "add", str(library), "calc")
    base = commit(app, "with a submodule")
    reference = write_layout(tmp_path / "calc", layout / "programs", tmp_path / "project", environment=ENVIRONMENT)
    task = replace(task, instance_id="calc__image-6", base_commit=base, build=ContainerBuild(OciBase(reference)))
    image = build(task.recipe(), store=store, name=task.instance_id)
    assert validate(task, image).status is Status.VALID
    with Sandbox.create(image.spec()) as box:
        box.exec("cat >> calc/core.py", stdin=b"\n\ndef triple(a):\n    return 3 * a\n").check()
        submission = box.patch()
    assert grade(task, image, submission).verdict is Verdict.RESOLVED
    assert grade(task, image, b"").verdict is Verdict.FAILED


@pytest.mark.slow
def test_a_dockerfile_over_it_gives_the_same_verdicts(task: Task, store: Store, layout: Path, tmp_path: Path) -> None:
    pytest.importorskip("e2b_dockerfile_utils")
    (tmp_path / "Dockerfile").write_text(
        f'FROM oci:{layout}/layout\nARG MORE=none\nENV MORE=$MORE\nRUN ["/bin/bash", "-c", "echo $MORE > /made"]\n'
    )
    made = ContainerBuild(DockerfileBase(tmp_path / "Dockerfile", tmp_path, args=(("MORE", "yes"),)))
    task = replace(task, instance_id="calc__image-2", build=made)
    image = build(task.recipe(), store=store, name=task.instance_id)
    assert validate(task, image).status is Status.VALID
    with Sandbox.create(image.spec()) as box:
        assert box.files.read_text("/made") == "yes\n"


@pytest.fixture
def bug(task: Task, layout: Path) -> str:
    """The patch that undoes the fix."""
    return git(layout / "project/app", "diff", "-R", task.base_commit, "HEAD", "--", "calc") + "\n"


@pytest.mark.slow
def test_a_bug_that_the_image_has_already(task: Task, store: Store, bug: str) -> None:
    task = replace(task, instance_id="calc__image-5", form=Form.BUGGY, patch=bug)
    image = build(task.recipe(), store=store, name=task.instance_id)
    assert validate(task, image).status is Status.VALID
    assert grade(task, image, FIX.encode()).verdict is Verdict.RESOLVED


@pytest.mark.slow
def test_a_bug_in_an_image_hides_its_tests(task: Task, store: Store, bug: str) -> None:
    task = replace(
        task,
        instance_id="calc__image-3",
        form=Form.SWESMITH,
        patch=bug,
        test_patch="",
        base_commit="",
    )
    image = build(task.recipe(), store=store, name=task.instance_id)
    assert validate(task, image).status is Status.VALID
    with Sandbox.create(image.spec()) as box:
        assert not box.files.exists("tests/test_double.py")


@pytest.mark.slow
def test_an_answer_elsewhere_in_the_image_is_found(task: Task, store: Store, layout: Path, tmp_path: Path) -> None:
    """All of a container's files are the image's own, /usr with them."""
    pytest.importorskip("e2b_dockerfile_utils")
    (tmp_path / "Dockerfile").write_text(f"FROM oci:{layout}/layout\nCOPY notes /usr/share/notes\n")
    (tmp_path / "notes").write_text("def test_triple():\n    from calc import core\n    assert core.triple(2) == 6\n")
    leaky = replace(
        task, instance_id="calc__image-4", build=ContainerBuild(DockerfileBase(tmp_path / "Dockerfile", tmp_path))
    )
    image = build(leaky.recipe(), store=store, name=leaky.instance_id)
    [leak] = find_leaks(leaky, image)
    assert (leak.kind, leak.place) == ("tests", "/usr/share/notes")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="with one id, every file is the user's own")
def test_an_image_of_another_user_is_graded_as_that_user(
    task: Task, store: Store, layout: Path, tmp_path: Path
) -> None:
    roots = (layout / "programs", layout / "project")
    reference = write_layout(tmp_path / "owned", *roots, environment=ENVIRONMENT, owner=1000)
    owned = replace(task, instance_id="calc__image-5", build=ContainerBuild(OciBase(reference)))
    image = build(owned.recipe(), store=store, name=owned.instance_id)
    assert image.user == "1000"
    assert validate(owned, image).status is Status.VALID
    with Sandbox.create(image.spec()) as box:
        assert box.exec("id -u; git status --porcelain").stdout == "1000\n"
        box.exec("echo 'x = 1' > calc/more.py")
        submission = box.patch()
    assert b"calc/more.py" in submission
    assert grade(owned, image, FIX.encode()).resolved


@pytest.mark.slow
def test_the_commands_work_on_image_tasks(task: Task, tmp_path: Path) -> None:
    lost = replace(task, instance_id="calc__image-lost", build=ContainerBuild(OciBase("oci:nowhere")))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one.to_row()) + "\n" for one in (task, lost)))
    environment = {**os.environ, "MINISANDBOX_STORE": str(tmp_path / "store")}

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "minisandbox", *words, "--allow-local-sources"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        return done.returncode, done.stdout + done.stderr

    status, said = run("validate", "tasks.jsonl", "-o", "validation")
    assert "valid" in said, said
    assert "nowhere" in said
    status, said = run("rollout", "tasks.jsonl", "--agent", "oracle", "-o", "run", "--json")
    rows = [json.loads(line)["rollout"] for line in said.splitlines() if line.startswith('{"rollout"')]
    rewards = {row["instance_id"]: row["reward"] for row in rows}
    assert rewards == {"calc__image-1": 1.0, "calc__image-lost": None}, said
    status, said = run("evaluate", "tasks.jsonl", "-p", "run/preds.json", "--only", "calc__image-1", "-o", "evaluation")
    assert status == 0, said
