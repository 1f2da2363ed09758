"""``make adversarial``: the attacks as whoever calls; from root as an ordinary user too, with one id and with many."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests import as_user  # noqa: E402 - after the path is set

HARNESS = Path("tests", "adversarial", "harness.py")


def attack_as(user: as_user.User, python: str, tree: Path, settings: Sequence[str], arguments: Sequence[str]) -> int:
    """`make adversarial` as another user; its output is ours."""
    variables = [f"PYTHON={python}", f"VENV={user.base / 'home' / 'venv'}", f"ATTACKS={' '.join(arguments)}"]
    make = ["make", "--no-print-directory", "--silent", "-C", str(tree), "adversarial", *variables]
    process = user.run(["env", *settings, *make], cwd=tree)
    return process.wait(as_user.LONGEST) or as_user.left_processes(user)


def attack_as_ordinary_users(arguments: Sequence[str]) -> int:
    with as_user.temporary_user() as user:
        python = as_user.find_python(user)
        if python is None:
            print("== as an ordinary user: skipped, no Python >= 3.11 that other users can execute was found")
            return 0
        tree = as_user.copy_tree(user)
        print("\n== with one id", flush=True)
        status = attack_as(user, python, tree, ["MINISANDBOX_ONE_ID=1"], arguments)
        try:
            mappers = as_user.find_mappers(user)
            as_user.give_range(user)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"== with a range of ids: skipped, {error}")
            return status
        print("\n== with a range of ids", flush=True)
        return attack_as(user, python, tree, [f"PATH={mappers}:{as_user.PATH}"], arguments) or status


def main() -> int:
    arguments = sys.argv[1:]
    root = os.geteuid() == 0
    print("== as root" if root else "== as an ordinary user", flush=True)
    status = subprocess.run([sys.executable, str(ROOT / HARNESS), *arguments], check=False).returncode
    if root and shutil.which("useradd"):
        as_user.remove_leftovers()
        status = attack_as_ordinary_users(arguments) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
