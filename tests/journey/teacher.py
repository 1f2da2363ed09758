"""What the scripted model of the journey answers: of each task, it solves a known number of attempts."""

from __future__ import annotations

from collections.abc import Sequence

from minisandbox.agents.baselines import apply_command
from minisandbox.tasks import Task

ATTEMPTS = 4
SOLVED = (4, 4, 3, 3, 2, 2, 1, 1, 0)
"""How many attempts at each task it solves, the first ones; of the others, one is wrong and the rest are empty."""
WAIT = "I wait.\n\n```bash\nuntil [ -e /tmp/go ]; do sleep 0.5; done\n```"
SUBMIT = "I am done.\n\n```submit\n```"


def script(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """Return the answers for each rollout of some tasks."""
    answers = {"*": [SUBMIT]}
    for task, solved in zip(tasks, SOLVED, strict=True):
        path = task.patch.partition("+++ b/")[2].partition("\n")[0]
        repair = _action("I repair it.", apply_command(task.reference))
        wrong = _action("I write a comment.", f"echo '# nothing' >> {path}\n")
        for attempt in range(solved):
            answers[f"{task.instance_id}__{attempt}"] = [repair, SUBMIT]
        answers[f"{task.instance_id}__{solved}"] = [wrong, SUBMIT]
    return answers


def rewards(tasks: Sequence[Task]) -> dict[tuple[str, int], float]:
    """Return the reward of each rollout, by task and attempt."""
    return {
        (task.instance_id, attempt): float(attempt < solved)
        for task, solved in zip(tasks, SOLVED, strict=True)
        for attempt in range(ATTEMPTS)
    }


def _action(thought: str, command: str) -> str:
    return f"{thought}\n\n```bash\n{command}```"
