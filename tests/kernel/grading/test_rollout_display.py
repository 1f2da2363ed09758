"""The panel of ``minisandbox rollout`` on a terminal: drawn, narrowed, interrupted, and gone at the end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.images import Image
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]

_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


def screen(text: str) -> list[str]:
    """What a terminal that is wide and high enough shows, row by row; raises what is no code that rich writes."""
    rows, y, x = [""], 0, 0
    for match in _CODE.finditer(text):
        piece, count, code = match[0], match[1] or "", match[2]
        if code == "A":
            y -= int(count or 1)
        elif code == "K":
            rows[y] = "" if count == "2" else rows[y][:x]
        elif code not in (None, "m", "h", "l"):
            raise AssertionError(f"an unknown code: {piece!r}")
        elif piece == "\n":
            y += 1
            rows += [""] * (y + 1 - len(rows))
        elif piece == "\r":
            x = 0
        elif code is None:
            rows[y] = rows[y].ljust(x)[:x] + piece + rows[y][x + 1 :]
            x += 1
    assert "".join(match[0] for match in _CODE.finditer(text)) == text, "half a code"
    return rows


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def command(task: Task, image: Image, place: Path, seconds: float = 2.0) -> tuple[list[str], dict[str, str]]:
    """A run of two rollouts that take a while, and have nothing to grade."""
    (place / "tasks.jsonl").write_text(json.dumps(task.to_row()) + "\n")
    (place / "commands.json").write_text(f'["sleep {seconds}"]')
    words = ["rollout", "tasks.jsonl", "--allow-local-sources", "--agent", "replay", "--recording", "commands.json"]
    words += ["--n", "2", "-o", "run"]
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    environment = {**kept, "MINISANDBOX_STORE": str(image.store.root), "TERM": "xterm-256color"}
    return [sys.executable, "-m", "minisandbox", *words], environment


@contextlib.contextmanager
def on_terminal(
    words: list[str], environment: dict[str, str], place: Path, columns: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    master, slave = pty.openpty()
    try:
        resize(master, columns)
        with subprocess.Popen(words, cwd=place, env=environment, stdin=slave, stdout=slave, stderr=slave) as process:
            os.close(slave)
            yield process, master
    finally:
        os.close(master)


def read(master: int, until: str = "") -> str:
    """What comes until a text is there, or until the end."""
    data = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
        while (piece := os.read(master, 1 << 16)) and not (until and until in (data + piece).decode(errors="replace")):
            data += piece
        data += piece
    return data.decode()


@pytest.mark.slow
def test_it_is_drawn_narrowed_and_wiped(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    words, environment = command(smith, smith_image, tmp_path)
    with on_terminal(words, environment, tmp_path, 100) as (process, master):
        wide = read(master, "1 agent")
        resize(master, 24)
        narrow = read(master, "1 agent")
        process.send_signal(signal.SIGINT)
        rest = read(master)
        assert process.wait(120) == 130
    assert any(line.startswith("rollouts  0 of 2") for line in screen(wide)), wide
    assert "\x1b[1m" in wide
    *_, frame = narrow.split("\x1b[2K")  # the last whole drawing
    assert all(len(line) <= 24 for line in screen(frame)), frame
    shown = [line for line in screen(wide + narrow + rest) if line.strip()]
    assert not [line for line in shown if line.startswith(("rollouts", "stages"))], shown
    assert sum("1 under way have 60 s to end; Ctrl-C again stops at once" in line for line in shown) == 1, shown
    assert sum(f"1/2 replay {smith.instance_id}: failed" in line for line in shown) == 1, shown


@pytest.mark.slow
def test_without_colours_and_to_its_end(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    fresh = replace(smith, instance_id="calc__fresh", patch=smith.patch.replace("a - b", "a * b"))  # to be built
    words, environment = command(fresh, smith_image, tmp_path, 1.0)
    with on_terminal(words, {**environment, "NO_COLOR": "1"}, tmp_path, 80) as (process, master):
        text = read(master)
        assert process.wait(120) == 0
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-7])(?:;[0-9;]*)?m", text), "a colour"
    assert "stages" in text
    assert "calc__fresh: task: " in text
    shown = [line for line in screen(text) if line.strip()]
    assert not [line for line in shown if line.startswith(("rollouts", "stages"))], shown
    assert sum("/2 replay calc__fresh" in line for line in shown) == 2, shown
    assert shown[-1] == "2 failed; trajectories in run"


@pytest.mark.slow
def test_where_nothing_can_be_drawn(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    words, environment = command(smith, smith_image, tmp_path, 0.0)
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    with on_terminal([*words[:-1], "dumb"], {**environment, "TERM": "dumb"}, tmp_path, 80) as (process, master):
        text = read(master)
        assert process.wait(120) == 0
    for told in (done.stdout + done.stderr, text):
        assert "\x1b" not in told
        assert "stages" not in told
        assert told.count(f"replay {smith.instance_id}") == 2
