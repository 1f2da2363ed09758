"""Run a program as two training processes, as ``accelerate launch --num_processes 2`` does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_in_two_processes(*arguments: str) -> None:
    """Run Python with arguments in both processes; both must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        output = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)[-3000:]
