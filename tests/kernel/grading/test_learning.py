"""Tasks made by mutation: they are valid, an agent of one edit solves them, and reinforcement learning runs on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from examples.learning.experiment import AGENT
from examples.learning.mutants import Mutating, clean_task, mutated_tasks, sources
from examples.learning.mutations import WordEdit, find_function, function_of, mutants
from tests.builds import python_build
from tests.vendored import vendor_pytest

from minisandbox.agents import AgentLimits, open_agent
from minisandbox.errors import InvalidValue
from minisandbox.grade import Verdict, validate
from minisandbox.images import Image
from minisandbox.models import ScriptedModel
from minisandbox.rollouts import KnownGrades, Setup, rollout_async
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource
from minisandbox.tasks import LogGrader, Task
from minisandbox.trajectories import Trajectory

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


def fix_of(task: Task) -> WordEdit:
    """The edit that the patch of a bug of one word takes back."""
    place = function_of(task.problem_statement)
    assert place is not None
    (bad,) = (line[1:] for line in task.patch.splitlines() if line.startswith("+") and not line.startswith("+++"))
    (good,) = (line[1:] for line in task.patch.splitlines() if line.startswith("-") and not line.startswith("---"))
    found = find_function(MODULE.replace(good, bad), *place)
    original = find_function(MODULE, *place)
    assert found is not None
    assert original is not None
    return next(one.fix for one in mutants(original) if one.lines == found.lines)


def roll_out(task: Task, image: Image, *answers: str, steps: int = 1, grades: KnownGrades | None = None) -> Trajectory:
    setup = Setup(
        agent=open_agent(AGENT),
        model=ScriptedModel(answers),
        agent_limits=AgentLimits(steps=steps),
        grades=grades,
    )
    return asyncio.run(rollout_async(task, image, setup))


def test_what_the_tests_find_is_a_valid_task(made: Sequence[Task], images: Callable[[Task], Image]) -> None:
    assert len(made) == 2
    for task in made:
        assert task.instance_id.startswith("example__lib-1.0.clip__")
        assert {one.partition("::")[0] for one in task.FAIL_TO_PASS + task.PASS_TO_PASS} == {"tests/test_clip.py"}
        assert validate(task, images(task)).valid


def test_one_answer_is_one_edit(made: Sequence[Task], images: Callable[[Task], Image]) -> None:
    task, image, known = made[0], images(made[0]), KnownGrades()
    fix = fix_of(task)
    done = roll_out(task, image, fix.text, grades=known)
    assert (done.exit_status, done.reward, done.failure) == ("submitted", 1.0, None)
    assert done.messages[0].content.startswith(" 1 def clip(value, low, high):\n 2     if ")
    again = roll_out(task, image, f" {fix.text}", grades=known)
    assert again.grade is done.grade
    wrong = roll_out(task, image, "raise -> 0 1")
    assert (wrong.exit_status, wrong.reward, wrong.steps) == ("exit_format", 0.0, ())
    other = roll_out(task, image, "ValueError -> KeyError 3")
    assert (other.exit_status, other.reward) == ("submitted", 0.0)
    assert other.grade is not None
    assert other.grade.verdict is Verdict.FAILED


def test_further_answers_follow_the_tests_that_are_there(made: Sequence[Task], images: Callable[[Task], Image]) -> None:
    task, image = made[0], images(made[0])
    done = roll_out(task, image, "nothing", "ValueError -> KeyError 3", fix_of(task).text, "submit", steps=9)
    assert [one.content for one in done.messages[2::2]] == ["error", "pass", "pass"]  # the test that fails is hidden
    assert (done.exit_status, done.reward) == ("submitted", 1.0)
    assert done.submission is not None
    assert b"KeyError" not in done.submission, "an edit is of the function as it was found"


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

    from minisandbox.train.config import Evaluation, Groups  # noqa: PLC0415 - the same
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - the same
    from minisandbox.train.sandboxes import SandboxEnvironment  # noqa: PLC0415 - the same

    save_tiny_model(tmp_path / "model", "llama")
    config = toy_config(tmp_path / "model", tmp_path / "run")
    policy = replace(config.policy, agent=AGENT, steps=1, max_tokens=6, deadline=300.0)
    config = replace(config, steps=1, groups=Groups(tasks=1, size=4, redo=0, refill=0), micro_batch=4, workers=2,
                     policy=policy, reuse_grades=True, evaluation=Evaluation(tasks=("x",)))  # fmt: skip
    setting = SandboxEnvironment(config, {made[0].instance_id: made[0]}, {made[1].instance_id: made[1]}, images)
    result = train_rl(config, setting)
    assert [(one.step, one.rollouts, one.failed) for one in result.scores] == [(0, 1, 0), (1, 1, 0)]
