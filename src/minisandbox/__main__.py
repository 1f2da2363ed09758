"""Run the command ``minisandbox`` as ``python -m minisandbox``."""

from __future__ import annotations

from minisandbox.cli.main import run

if __name__ == "__main__":
    run()
