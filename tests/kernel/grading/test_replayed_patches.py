"""The diffs of turns of a rollout that did not record them: its commands run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisandbox.agents import AgentOptions, BashAgent
from minisandbox.images import Image
from minisandbox.models import ScriptedModel
from minisandbox.rollouts import RunReader, Setup, run_batch
from minisandbox.tasks import Task
from minisandbox.view import Site

pytest.importorskip("starlette", reason="the extra [view] is not installed")
pytest.importorskip("jinja2", reason="the extra [view] is not installed")

from minisandbox.view.pages import Pages

pytestmark = [pytest.mark.kernel, pytest.mark.once, pytest.mark.slow]

ANSWERS = [
    "```bash\nsed -i 's/a - b/a + b/' calc/core.py\n```",
    "```bash\nfalse\n```",
    "```bash\necho 'é' > note.txt; test ! -e /tmp/again\n```",
    "```submit\n```",
]


def test_a_replay_finds_the_patches_that_a_run_would_have_recorded(
    smith: Task, smith_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISANDBOX_STORE", str(smith_image.store.root))
    for name in ("recorded", "plain"):
        model = ScriptedModel({smith.instance_id: ANSWERS})
        setup = Setup(agent=BashAgent(AgentOptions()), model=model, turn_patches=name == "recorded")
        run_batch([smith], setup, tmp_path / name, image_of=lambda _: smith_image)
    with RunReader(tmp_path / "recorded") as run:
        recorded = run.trajectory(smith.instance_id, 0)
    assert recorded is not None
    pages = Pages(Site([tmp_path]))
    page = pages.rollout("plain", smith.instance_id, 0)
    assert f'action="/runs/plain/replay/0/{smith.instance_id}"' in page
    assert 'class="workspace"' not in page
    pages.replay("plain", smith.instance_id, 0)
    page = pages.rollout("plain", smith.instance_id, 0)
    assert page.count('class="workspace"') == 2
    assert "the 3 commands ran again" in page
    assert "All exited as recorded" in page
    for turn, record in ((1, recorded.patches[0]), (3, recorded.patches[1])):
        assert record.turn == turn
        assert pages.raw("plain", smith.instance_id, 0, f"turn {turn}").encode() == record.patch
