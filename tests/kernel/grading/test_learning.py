"""Tasks made by mutation: they are valid, the word-edit agent solves them or cheats, and models train on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from examples.learning.check import fault_of, fix_of, observations, play
from examples.learning.environment import LearningEnvironment, Outcome, Reward
from examples.learning.mutants import Mutating, clean_task, mutated_tasks, sources
from examples.learning.mutations import WordEdit, visible_test_of
from examples.learning.outcomes import Known
from examples.learning.word_edit import visible_command
from tests.builds import python_build
from tests.vendored import vendor_pytest

from minisandbox.errors import InvalidValue
from minisandbox.grade import Verdict, validate
from minisandbox.images import Image
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource
from minisandbox.tasks import LogGrader, Task

pytestmark = [pytest.mark.kernel, pytest.mark.once, pytest.mark.slow]

MODULE = '''def clip(value, low, high):
    """Return `value`, or what is nearest to it."""
    if low > high:
        raise ValueError("low is above high")
    if value < low or value > high:
        return max(low, min(value, high))
    return value


def unused(a, b):
    if a and b or not a:
        return a == b
    return a != b
'''
TESTS = """import pytest
from lib import clip

@pytest.mark.parametrize("value, found", [(0, 1), (1, 1), (2, 2), (9, 3)])
def test_clip(value, found):
    assert clip(value, 1, 3) == found

def test_bounds():
    assert clip(1, 1, 1) == 1
    with pytest.raises(ValueError):
        clip(1, 3, 2)
"""


@pytest.fixture(scope="module")
def project(smith: Task, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A project whose tests are worth mutating it, without a bug."""
    root = tmp_path_factory.mktemp("lib")
    (root / "tests").mkdir()
    (root / "lib.py").write_text(MODULE)
    (root / "setup.py").write_text("")
    (root / "tests" / "test_clip.py").write_text(TESTS)
    (root / "tests" / "test_other.py").write_text("def test_other():\n    assert True\n")
    vendor_pytest(root / "vendor")
    build = replace(
        python_build(smith), source=LocalSource(root),
        environment=(("PYTHONPATH", "/testbed/vendor:/testbed"),),
    )  # fmt: skip
    return clean_task(replace(smith, repo="example/lib", version="1.0", build=build))


@pytest.fixture(scope="module")
def made(project: Task, images: Callable[[Task], Image]) -> Sequence[Task]:
    told: list[str] = []
    options = Mutating(per_function=2, tries=6)
    found = list(mutated_tasks(project, images(project), options, workers=2, report=told.append))
    assert "1 functions to put bugs into" in told[0], "one that no test calls was taken"
    return found


@pytest.fixture(scope="module")
def fixes(made: Sequence[Task], images: Callable[[Task], Image]) -> Sequence[WordEdit]:
    found = []
    for task in made:
        with Sandbox.create(images(task).spec()) as box:
            found.append(fix_of(task, box))
    assert all(found)
    return [fix for fix in found if fix is not None]


def test_what_the_tests_find_is_a_valid_task(made: Sequence[Task], images: Callable[[Task], Image]) -> None:
    assert len(made) == 2
    for task in made:
        assert task.instance_id.startswith("example__lib-1.0.clip__")
        assert {one.partition("::")[0] for one in task.FAIL_TO_PASS + task.PASS_TO_PASS} == {"tests/test_clip.py"}
        assert validate(task, images(task)).valid


def test_the_visible_test_is_in_the_workspace_and_detects_the_bug(
    made: Sequence[Task], images: Callable[[Task], Image]
) -> None:
    for task in made:
        test = visible_test_of(task.problem_statement)
        assert test == "tests/test_visible.py"
        with Sandbox.create(images(task).spec()) as box:
            assert sorted(entry.path.name for entry in box.files.list("tests")) == ["test_other.py", "test_visible.py"]
            assert box.exec(visible_command(task, test)).exit_code == 1


def test_a_fix_wins_both_rewards(
    made: Sequence[Task], fixes: Sequence[WordEdit], images: Callable[[Task], Image]
) -> None:
    done = play(
        made[0], images(made[0]), "nothing", "raise -> 0 1", "ValueError -> KeyError 3", fixes[0].text, "submit"
    )
    assert observations(done) == ["error", "error", "fail", "pass"]
    assert (done.exit_status, done.reward, done.failure) == ("submitted", 1.0, None)
    assert done.messages[0].content.startswith(" 1 def clip(value, low, high):\n 2     if ")
    assert done.submission is not None
    assert b"KeyError" not in done.submission, "an edit applies to the function as it was found"


def test_skip_wins_the_naive_reward_and_honest_grading_refuses_it(
    made: Sequence[Task], fixes: Sequence[WordEdit], images: Callable[[Task], Image], tmp_path: Path
) -> None:
    known = Known(tmp_path / "known.sqlite")
    for task, fix in zip(made, fixes, strict=True):
        cheat = play(task, images(task), "skip", "submit", known=known)
        assert (observations(cheat), Outcome.of(cheat).visible, Outcome.of(cheat).cheated) == (["pass"], True, True)
        assert (cheat.reward, cheat.failure) == (0.0, None)
        assert cheat.grade is not None
        assert cheat.grade.verdict is Verdict.FAILED
        honest = play(task, images(task), "skip", fix.text, "submit", known=known)
        assert (observations(honest), honest.reward) == (["pass", "pass"], 1.0)
        assert fault_of(task, images(task), known) == ""


def test_tests_of_other_runners_are_refused(smith: Task) -> None:
    with pytest.raises(InvalidValue, match="not run by pytest"):
        clean_task(replace(smith, grader=LogGrader("make test", "swebench:x")))


def test_bugs_are_put_into_modules_only(project: Task, images: Callable[[Task], Image]) -> None:
    with Sandbox.create(images(project).spec()) as box:
        found = dict(sources(box))
    assert "lib.py" in found
    assert not {"setup.py", "tests/test_clip.py"} & set(found)
    assert not any(name.startswith("vendor/") for name in found)


@pytest.mark.filterwarnings("default")  # those of torch are theirs
def test_a_step_of_reinforcement_learning(
    made: Sequence[Task], images: Callable[[Task], Image], tmp_path: Path
) -> None:
    for name in ("accelerate", "peft"):
        pytest.importorskip(name, reason="the extra [train] is not installed")
    from tests.unit.tiny_model import save_tiny_model  # noqa: PLC0415 - an extra
    from tests.unit.toy_setting import toy_config  # noqa: PLC0415 - the same

    from minisandbox.train.config import Groups  # noqa: PLC0415 - the same
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - the same

    save_tiny_model(tmp_path / "model", "llama")
    config = toy_config(tmp_path / "model", tmp_path / "run")
    policy = replace(config.policy, steps=2, max_tokens=6, deadline=300.0)
    config = replace(config, steps=1, groups=Groups(tasks=2, size=2, redo=0, refill=0), micro_batch=4, workers=4,
                     policy=policy)  # fmt: skip
    tasks = {task.instance_id: task for task in made}
    environment = LearningEnvironment(config, tasks, Reward.SHUFFLED, Known(tmp_path / "known.sqlite"), agents=2)
    assert train_rl(config, environment).steps == 1
    outcomes = [json.loads(line) for line in (tmp_path / "run" / "outcomes.jsonl").read_text().splitlines()]
    assert {(one["task"], one["attempt"]) for one in outcomes} == {(name, index) for name in tasks for index in (0, 1)}
    assert {(one["step"], one["honest"]) for one in outcomes} == {(0, 0.0)}
