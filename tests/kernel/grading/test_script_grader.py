"""The script grader: rewards from a file, in a fresh sandbox and in the agent's own; no reward is no 0."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.identities import has_one_id

from minisandbox.agents import Agent, Ending, OracleAgent, Session
from minisandbox.grade import LIVE, Grade, Reason, Verdict, grade, grade_untouched, grade_work, validate
from minisandbox.grade.graders.script import parse_reward
from minisandbox.grade.verdict import NOT_CONFIRMED
from minisandbox.images import Image
from minisandbox.rollouts import Setup, rollout
from minisandbox.rollouts.rollout import rollout_async
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import ScriptGrader, Task
from minisandbox.trajectories import Trajectory

pytestmark = pytest.mark.once

CHECK = """\
python3 -c 'import sys; sys.path.insert(0, "."); from calc.core import add; assert add(2, 3) == 5'
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture
def checks(tmp_path: Path) -> Path:
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "test.sh").write_text(CHECK)
    return tmp_path / "checks"


@pytest.fixture
def scripted(smith: Task, checks: Path) -> Task:
    return replace(smith, FAIL_TO_PASS=(), PASS_TO_PASS=(), grader=ScriptGrader(files=checks, timeout=30.0))


def with_command(task: Task, command: str, **changes: object) -> Task:
    return replace(task, grader=ScriptGrader(command, timeout=30.0, **changes))  # type: ignore[arg-type] # any field


def test_the_script_decides(scripted: Task, smith_image: Image) -> None:
    found = validate(scripted, smith_image)
    assert found.valid, found
    assert (found.reference[0].reward, found.empty[0].reward) == (1.0, 0.0)
    fix = scripted.patch.replace("-    return a + b\n+    return a - b", "-    return a - b\n+    return b + a")
    solved = grade(scripted, smith_image, fix.encode())
    assert (solved.verdict, solved.reward, flags(solved)) == (Verdict.RESOLVED, 1.0, [NOT_CONFIRMED]), solved


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("true", "wrote no /logs/verifier/reward.txt and no /logs/verifier/reward.json"),
        ("exit 7", "exit status 7"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "did not end by itself: killed by SIGKILL"),
        ("echo pass > /logs/verifier/reward.txt", "'pass': could not convert string to float"),
        ("echo nan > /logs/verifier/reward.txt", "not a finite number"),
        ("echo 1 > /logs/verifier/reward.txt; echo no > /logs/verifier/reward.json", "reward.json holds 'no'"),
        ("mkdir /logs/verifier/reward.txt", "cannot be read"),
        ("mkfifo /logs/verifier/reward.txt", "cannot be read"),
        ("ln -s /dev/zero /logs/verifier/reward.txt", "cannot be read"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "cannot be read"),
        ("printf '\\377' > /logs/verifier/reward.txt", "could not convert string to float"),
    ],
)
def test_no_reward_is_our_failure(scripted: Task, smith_image: Image, command: str, cause: str) -> None:
    found = grade(with_command(scripted, command), smith_image, b"")
    assert (found.verdict, found.reason, found.reward) == (Verdict.INFRA_ERROR, Reason.NO_REWARD, None), found
    assert cause in found.detail


def test_a_script_that_hangs_after_its_reward_gives_none(scripted: Task, smith_image: Image) -> None:
    slow = with_command(scripted, "echo 1 > /logs/verifier/reward.txt; sleep 60")
    found = grade(slow, smith_image, b"", timeout=1.0)
    assert (found.verdict, found.reason, found.reward) == (Verdict.INFRA_ERROR, Reason.NO_REWARD, None), found
    assert "timed out" in found.detail or "1 s" in found.detail, found.detail


def test_files_that_are_not_there_are_our_failure(scripted: Task, smith_image: Image, tmp_path: Path) -> None:
    lost = replace(scripted, grader=ScriptGrader(files=tmp_path / "nowhere"))
    found = grade(lost, smith_image, b"")
    assert (found.verdict, found.reward) == (Verdict.INFRA_ERROR, None), found


@pytest.mark.parametrize(("text", "reward"), [("1\n", 1.0), ("0.25", 0.25), ("-1", -1.0), (" 1e-3 ", 1e-3)])
def test_rewards_of_a_text_file(text: str, reward: float) -> None:
    assert parse_reward(text, is_json=False) == reward


@pytest.mark.parametrize("text", ["", "true", "1 point", "1\n1", "inf", '{"reward": 1}'])
def test_text_files_without_a_reward(text: str) -> None:
    with pytest.raises(ValueError, match=r"could not convert|not a finite"):
        parse_reward(text, is_json=False)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"reward": 0.5, "style": 1}\n', 0.5),
        ('{"score": 1}', 1.0),
        ('{"reward": true}', 1.0),
        ('{"reward": false, "style": true}', 0.0),
    ],
)
def test_rewards_of_a_json_file(text: str, reward: float) -> None:
    assert parse_reward(text, is_json=True) == reward


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "Expecting value"),
        ('{"reward": 1} done', "Extra data"),
        ("1", "not a JSON object"),
        ("true", "not a JSON object"),
        ("{}", "not a JSON object"),
        ('{"reward": "1"}', "'1' is not a number"),
        ('{"reward": null}', "None is not a number"),
        ('{"reward": 1, "note": "good"}', "'good' is not a number"),
        ('{"reward": NaN}', "not a finite number"),
        ('{"reward": 1' + "0" * 400 + "}", "not a finite number"),
        ('{"accuracy": 1, "speed": 0}', "none of which is called 'reward'"),
        ("[" * 100_000, "too deeply nested"),
    ],
)
def test_json_files_without_a_reward(text: str, cause: str) -> None:
    with pytest.raises(ValueError, match=re.escape(cause)):
        parse_reward(text, is_json=True)


def test_a_part_of_the_reward_is_a_score(scripted: Task, smith_image: Image) -> None:
    some = with_command(scripted, "echo 0.5 > /logs/verifier/reward.txt")
    found = grade_untouched(some, smith_image)
    assert (found.verdict, found.score, found.reward, found.resolved) == (Verdict.FAILED, 0.5, 0.5, False)


def test_the_script_runs_as_its_user_in_its_directory_with_its_variables(scripted: Task, smith_image: Image) -> None:
    command = "[ $(id -un) = nobody ] && [ $PWD = /tmp ] && echo $GIVEN > /result/reward"
    own = with_command(
        scripted, command, reward_file="/result/reward", user="nobody", workdir="/tmp", environment=(("GIVEN", "0.75"),)
    )
    found = grade_untouched(own, smith_image)
    with Sandbox.create(smith_image.spec()) as box:
        if has_one_id(box):
            assert found.reason is Reason.INFRASTRUCTURE
            assert "this sandbox has one id only" in found.detail
            return
    assert found.reward == 0.75, found


# --- the agent's own sandbox -----------------------------------------------------------------------------------------


class Commands(Agent):
    """An agent that runs commands, the last of which may go on."""

    name = "commands"
    needs_model = False

    def __init__(self, *commands: str) -> None:
        self._commands = commands

    async def run(self, task: Task, session: Session) -> Ending:
        """Run them."""
        for command in self._commands:
            await session.perform(command, timeout=20.0)
        return Ending("submitted")


def live_grader(task: Task) -> ScriptGrader:
    assert isinstance(task.grader, ScriptGrader)
    return replace(task.grader, mode="live")


def live(task: Task, commands: Sequence[str], image: Image) -> Trajectory:
    there = replace(task, grader=live_grader(task))
    return asyncio.run(rollout_async(there, image, Setup(agent=Commands(*commands))))


def flags(found: Grade | None) -> list[str]:
    assert found is not None
    return [flag.kind for flag in found.flags]


def test_live_work_is_judged_where_it_is_and_marked(scripted: Task, smith_image: Image) -> None:
    done = live(scripted, ["sed -i 's/a - b/a + b/' calc/core.py"], smith_image)
    assert (done.reward, flags(done.grade)) == (1.0, [LIVE, NOT_CONFIRMED]), done
    assert done.timings.grade
    idle = live(scripted, [], smith_image)
    assert (idle.reward, flags(idle.grade)) == (0.0, [LIVE]), idle


def test_what_an_agent_left_in_the_reward_files_place_is_not_read(scripted: Task, smith_image: Image) -> None:
    planted = ["mkdir -p /logs/verifier /elsewhere", "echo 1 > /elsewhere/reward.txt"]
    for trick in (
        "echo 1 > /logs/verifier/reward.txt",
        "echo 1 > /logs/verifier/reward.json",
        "rmdir /logs/verifier; ln -s /elsewhere /logs/verifier",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod -w /tests/test.sh",
        "ln -s /elsewhere /tests; printf 'echo 1 > /logs/verifier/reward.txt' > /elsewhere/test.sh",
    ):
        found = live(scripted, [*planted, trick], smith_image)
        assert found.reward == 0.0, (trick, found)
    silent = live(with_command(scripted, "true"), [*planted, "echo 1 > /logs/verifier/reward.txt"], smith_image)
    assert silent.grade is not None
    assert (silent.reward, silent.grade.reason, silent.finished) == (None, Reason.NO_REWARD, False), silent


def test_services_of_the_agent_go_on(scripted: Task, smith_image: Image) -> None:
    script = "read answer < /tmp/pipe; echo $answer > /logs/verifier/reward.txt"
    served = live(
        with_command(scripted, script), ["mkfifo /tmp/pipe; (echo 1 > /tmp/pipe) > /dev/null 2>&1 &"], smith_image
    )
    assert served.reward == 1.0, served


def test_a_patch_for_a_live_task_is_judged_in_a_fresh_sandbox(scripted: Task, smith_image: Image) -> None:
    there = replace(scripted, grader=live_grader(scripted))
    assert validate(there, smith_image).valid
    with Sandbox.create(smith_image.spec()) as box:
        assert flags(grade_work(there, box, smith_image.spec())) == [LIVE]


def test_the_oracle(scripted: Task, smith_image: Image, images: Callable[[Task], Image]) -> None:
    assert rollout(scripted, smith_image, OracleAgent()).reward == 1.0
