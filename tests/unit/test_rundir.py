"""Run directories: one writer, whole files, the same configuration."""

from __future__ import annotations

import json
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.errors import RunError, TrajectoryError
from minisandbox.rollouts import RunDirectory
from minisandbox.trajectories import Timings, Trajectory

CONFIG: dict[str, str | int | float | bool | None] = {"agent": "oracle", "workers": 2, "timeout": None}
TRAJECTORY = Trajectory(
    "a__b-1", 0, "oracle", "i", "k", "2025-01-01T00:00:00+00:00", "0", "submitted", "", (), b"", None, None, Timings()
)


def test_what_is_written_is_found_again(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        assert run.load("a__b-1", 0) is None
        path = run.write(TRAJECTORY)
        assert path == tmp_path / "run" / "trajectories" / "a__b-1__0.json"
        assert run.load("a__b-1", 0) == TRAJECTORY
        run.write(replace(TRAJECTORY, detail="again"))
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        again = run.load("a__b-1", 0)
        assert again is not None
        assert again.detail == "again"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == CONFIG


def test_long_and_odd_names(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        names = ["é" * 200, "e" * 199 + "a", "e" * 199 + "b", "a b", "-rf", "100%"]
        for name in names:
            run.write(replace(TRAJECTORY, instance_id=name))
        assert all(run.load(name, 0) is not None for name in names)
        assert len(list((tmp_path / "trajectories").iterdir())) == len(names)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG), pytest.raises(RunError, match="in use"):
        RunDirectory.open(tmp_path, CONFIG)
    RunDirectory.open(tmp_path, CONFIG).close()


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, CONFIG).close()
    RunDirectory.open(tmp_path, {**CONFIG, "workers": 7}).close()
    with pytest.raises(RunError, match="agent = 'oracle', not 'empty'"):
        RunDirectory.open(tmp_path, {**CONFIG, "agent": "empty"})
    with pytest.raises(RunError, match="script"):
        RunDirectory.open(tmp_path, {**CONFIG, "script": "x"})
    RunDirectory.open(tmp_path, CONFIG).close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "minisandbox-run", "version": 99, "config": {}}'])
def test_a_directory_that_is_no_run_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError):
        RunDirectory.open(tmp_path, CONFIG)
    assert (tmp_path / "run.json").read_text() == text


def test_half_written_files_are_never_seen_and_swept(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, CONFIG).close()
    left = tmp_path / "trajectories" / ".a__b-1__0.json.0123456789ab"
    left.write_text('{"format"')
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert not left.exists()
        assert run.load("a__b-1", 0) is None


def test_a_damaged_trajectory_is_named(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.file_of("a__b-1", 0).write_text("{}")
        with pytest.raises(TrajectoryError, match="a__b-1__0"):
            run.load("a__b-1", 0)


def test_a_write_that_the_kernel_cuts_off_leaves_the_old_file(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.write(TRAJECTORY)
        old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                run.write(replace(TRAJECTORY, detail="x" * 100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old_handler)
        assert run.load("a__b-1", 0) == TRAJECTORY
        assert not list((tmp_path / "trajectories").glob(".*"))


def test_threads_write_at_once(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        threads = [
            threading.Thread(target=run.write, args=(replace(TRAJECTORY, attempt=number % 4),)) for number in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(run.load("a__b-1", attempt) is not None for attempt in range(4))
        assert len(list((tmp_path / "trajectories").iterdir())) == 4
