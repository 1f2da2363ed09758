"""``trajectories open``: the workspace of a rollout after any of its turns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisandbox.agents import AgentOptions, BashAgent
from minisandbox.cli.main import main
from minisandbox.images import Image
from minisandbox.models import ScriptedModel
from minisandbox.rollouts import Setup, run_batch
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]

FIX = "```bash\nsed -i 's/a - b/a + b/' calc/core.py\n```"
NOTE = "```bash\necho 'é' > note.txt\n```"
SUBMIT = "```submit\n```"


def test_the_workspace_after_each_turn(
    smith: Task, smith_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = ScriptedModel({smith.instance_id: [FIX, NOTE, SUBMIT]})
    setup = Setup(agent=BashAgent(AgentOptions()), model=model)
    run_batch([smith], setup, tmp_path / "run", image_of=lambda _: smith_image)
    monkeypatch.setenv("MINISANDBOX_STORE", str(smith_image.store.root))

    def commands(script: str, *options: str) -> tuple[int, str]:
        (tmp_path / "script").write_text(script)
        capfd.readouterr()
        stdin = os.dup(0)
        with (tmp_path / "script").open("rb") as file:
            os.dup2(file.fileno(), 0)
        try:
            status = main(["trajectories", "open", str(tmp_path / "run"), smith.instance_id, *options])
        finally:
            os.dup2(stdin, 0)
            os.close(stdin)
        return status, capfd.readouterr().out

    assert commands("grep -c 'a + b' calc/core.py; ls note.txt", "--turn", "1") == (2, "1\n")
    assert commands("grep -c 'a + b' calc/core.py; cat note.txt", "--turn", "2") == (0, "1\né\n")
    assert commands("cat note.txt; exit 7") == (7, "é\n")
    assert main(["trajectories", "open", str(tmp_path / "run"), smith.instance_id, "--turn", "9"]) == 6
    assert main(["trajectories", "open", str(tmp_path / "run"), "nothing"]) == 6
