"""What a person sees during a step, and how training ends when it is stopped."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minisandbox.cli.main import main
from minisandbox.train.progress import RolloutProgress, warnings_of
from minisandbox.train.running import resume_message


def test_progress_of_a_step() -> None:
    async def observe() -> str:
        counts = iter([0, 500])
        progress = RolloutProgress(sampled=lambda: next(counts), testing=lambda: 1)
        with progress.reported(8):
            progress.started, progress.done = 5, 2
            return progress.describe()

    text = asyncio.run(observe())
    assert text.startswith("8 rollouts: 2 done, 2 with the agent, 1 testing, 3 waiting; ")
    assert "tokens/s; about " in text


@pytest.mark.parametrize(
    ("stats", "first", "words"),
    [
        ({"groups": 0.0, "groups_silent": 8.0}, None, "all 8 groups are silent"),
        ({"groups": 1.0, "learning_rate": 0.0}, None, "the learning rate is 0"),
        ({"groups": 1.0, "entropy": 0.05}, 1.0, "the entropy has collapsed from 1 to 0.05"),
        ({"groups": 1.0, "learning_rate": 1e-6, "entropy": 0.5}, 1.0, ""),
        ({"groups": 0.0, "groups_silent": 8.0, "entropy": 0.0}, 1.0, "all 8 groups are silent"),
    ],
)
def test_warnings_about_a_step(stats: dict[str, float], first: float | None, words: str) -> None:
    assert words in "".join(warnings_of(stats, first))
    assert len(warnings_of(stats, first)) == bool(words)


def test_what_is_left_after_an_interruption(tmp_path: Path) -> None:
    assert "starts over" in resume_message(str(tmp_path))
    for name, is_whole in (("checkpoint-5", True), ("checkpoint-10", False)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if is_whole:
            (tmp_path / "checkpoints" / name / "complete").touch()
    assert resume_message(str(tmp_path)) == "the same command resumes from the checkpoint of step 5"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_training_exits_although_an_operation_takes_long(number: signal.Signals, status: int, tmp_path: Path) -> None:
    program = f"""
import argparse, signal, time
from minisandbox.cli import main, train
train._EXIT_SECONDS = 0.3
main._handle_sigterm(args := argparse.Namespace())
with train._prompt_exit(args, {str(tmp_path)!r}):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == status
    assert "there is no checkpoint yet, so the same command starts over" in errors


def test_sigterm_cancels_the_tasks_of_an_event_loop() -> None:
    program = """
import argparse, asyncio
from minisandbox.cli import main

async def wait():
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise

main._handle_sigterm(args := argparse.Namespace())
try:
    asyncio.run(wait())
except KeyboardInterrupt:
    print("terminated", args.terminated)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert output == "cancelled\nterminated True\n", errors


def test_options_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "options", "rl"]) == 0
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("optimizer.learning_rate") for line in lines)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt(3)")
def test_a_batchs_memory_is_used_again() -> None:
    pytest.importorskip("torch")
    program = """
import resource
import torch
from minisandbox.train.running import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch = [torch.ones(5 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
keep_freed_memory()
print(faults(), min(faults() for _ in range(5)))
"""
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    first, later = map(int, run.stdout.split())
    assert later < first / 10


def test_busy_processors_are_not_idle() -> None:
    from minisandbox.train.running import idle_processors  # noqa: PLC0415 - for this test alone

    cpu = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    program = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        assert idle_processors() == 0
    finally:
        os.sched_setaffinity(0, before)
        busy.kill()
        busy.communicate()
    assert 0 <= idle_processors() <= len(before)
