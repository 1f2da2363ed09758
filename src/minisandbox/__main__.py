"""Run the command ``minisandbox`` as ``python -m minisandbox``."""

from __future__ import annotations

from minisandbox.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
