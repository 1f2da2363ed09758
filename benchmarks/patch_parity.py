"""Compare how damaged patches are applied: by ``grade``, and by the harnesses' own commands on a checkout.

python -m benchmarks.patch_parity ROWS... --repo-mirrors DIR [--only GLOB] [--damages NAME,NAME] [--rows N] [--five]

Each row's reference patch is damaged in 49 ways. ``grade`` gets it with a script in place of the tests, which
prints a hash of the work tree; no Python environment is built. On the host, the commands of swebench 4.1.0 and swesmith
(with --five: of swebench 5.0.2) run as they are. Both must name the same command that applies the patch, and have the
same tree afterwards. The exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.parity.damages import TREE, damaged, harness, tree_of
from benchmarks.parity.variants import reference_patch

from minisandbox.grade import Grade, Verdict, grade
from minisandbox.grade.verdict import APPLIED_WITH_FUZZ
from minisandbox.images import Image, build
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.tasks import Form, ScriptGrader, Task, TaskSet

_REWARD = "/logs/verifier/reward.txt"
_SCRIPT = f"set -- HEAD\n{TREE}echo 0 > {_REWARD}"


class _Script5(ScriptGrader):
    """The script, of a row of swebench 5."""

    parser = "swebench5:none"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a patch came to.

    Attributes:
        command: the command that applied it; "" if none did.
        tree: the hash of the work tree afterwards; "" if it was not applied.
    """

    command: str
    tree: str


def main() -> int:
    """Compare and print; 0 if all is equal, 1 if not."""
    options = _options()
    sets = [TaskSet.load(name, repo_mirrors=options.repo_mirrors) for name in options.rows]
    tasks = [task for each in sets for task in (each.select([options.only]) if options.only else each)]
    counts: Counter[str] = Counter()
    differing = 0
    for task in tasks[: options.limit]:
        with tempfile.TemporaryDirectory() as folder:
            for name, ours, theirs in compare(task, Path(folder), options):
                counts[theirs.command or "not applied"] += 1
                if ours != theirs:
                    differing += 1
                    print(f"{task.instance_id}, {name}: ours {ours}, theirs {theirs}", flush=True)
        print(f"{task.instance_id}: {counts.total()} compared, {differing} differ", flush=True)
    print("\n".join(f"{count:6} {command}" for command, count in counts.most_common()))
    return int(differing > 0)


def compare(task: Task, folder: Path, options: argparse.Namespace) -> list[tuple[str, Outcome, Outcome]]:
    """Return for each damage its name, our outcome and the harness's."""
    source = _checkout(task, options.repo_mirrors, folder / "source")
    grader = (_Script5 if options.five else ScriptGrader)(command=_SCRIPT, reward_file=_REWARD)
    task = replace(task, build=PythonRecipe(source=LocalSource(source)), grader=grader)
    image = build(task.recipe(), store=Store.open(), name=f"patch-parity-{task.instance_id}")
    tree = _as_for_an_agent(task, source)
    patches = damaged(reference_patch(task).encode("utf-8", "surrogateescape"), tree, options.damages)
    return [
        (name, ours(task, image, text), theirs(tree, text, folder / "patch.diff", five=options.five))
        for name, text in patches
    ]


def ours(task: Task, image: Image, patch: bytes) -> Outcome:
    """Grade a patch with the script that prints the hash of the work tree."""
    return outcome(grade(task, image, patch))


def outcome(graded: Grade) -> Outcome:
    """Return what a grade by the script says."""
    if graded.verdict is Verdict.PATCH_INVALID:
        return Outcome("", "")
    fuzzy = [flag.detail for flag in graded.flags if flag.kind == APPLIED_WITH_FUZZ]
    lines = [line for line in graded.log.splitlines() if line.startswith("tree ")]
    return Outcome(fuzzy[0] if fuzzy else "git apply --verbose", lines[0].split()[1] if lines else str(graded))


def theirs(tree: Path, patch: bytes, file: Path, *, five: bool) -> Outcome:
    """Apply a patch to a clean checkout by the harness's commands."""
    _git(tree, "reset", "-q", "--hard")
    _git(tree, "clean", "-qfdx")
    command = harness(tree, patch, file, five=five)
    return Outcome(command, tree_of(tree, "HEAD") if command else "")


def _checkout(task: Task, mirrors: Path, tree: Path) -> Path:
    """Check out a task's commit from the first repository that has it."""
    for marker in sorted([*mirrors.glob("*/HEAD"), *mirrors.glob("*/*/HEAD"), *mirrors.glob("*/.git")]):
        repository = str(marker.parent)
        if (
            subprocess.run(
                ["git", "-C", repository, "cat-file", "-e", task.base_commit], check=False, capture_output=True
            ).returncode
            == 0
        ):
            _git(mirrors, "clone", "-q", "--no-checkout", repository, str(tree))
            _git(tree, "checkout", "-q", task.base_commit)
            return tree
    raise SystemExit(f"no repository in {mirrors} has {task.base_commit}, the commit of {task.instance_id}")


def _as_for_an_agent(task: Task, tree: Path) -> Path:
    """Change a checkout to what the task's image has, and commit that."""
    if task.form is Form.SWESMITH:
        (tree.parent / "bug.diff").write_text(task.patch)
        _git(tree, "apply", "--whitespace=nowarn", str(tree.parent / "bug.diff"))
        _git(tree, "rm", "-q", "--", *task.hidden_files)
        _git(tree, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qam", "bug")
    return tree


def _git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=tree, check=True, stdout=subprocess.DEVNULL)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="files of rows")
    parser.add_argument("--repo-mirrors", type=Path, required=True, help="a directory of git repositories")
    parser.add_argument("--only", default="", help="a pattern of instance ids")
    parser.add_argument("--limit", type=int, default=None, help="rows at most")
    parser.add_argument(
        "--damages", type=lambda text: text.split(","), default=[], help="names of damages; all if left out"
    )
    parser.add_argument("--five", action="store_true", help="compare with swebench 5.0.2")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
