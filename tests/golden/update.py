"""Write the golden data anew from the code as it is: ``python tests/golden/update.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/unit/test_golden.py", "tests/unit/test_names.py", "tests/kernel/grading/test_golden_runs.py")

if __name__ == "__main__":
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS, *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "MINISANDBOX_UPDATE_GOLDEN": "1"}, check=False)
    subprocess.run(["git", "diff", "--stat", "--", "tests/golden", "docs/reference/api"], cwd=ROOT, check=False)
    raise SystemExit(status.returncode)
