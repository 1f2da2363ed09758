"""Search a task's image for leaks of the solution or the hidden tests.

The search runs inside a sandbox, with an agent's view of the image. The task's repository may have only one commit. The
search reports further commits, lines of the reference or of hidden tests in any file or git history, and archives of
the project. It also finds a newer or fixed copy of the project, because the copy contains the reference's lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.errors import FileAccessError, GradingError
from minisandbox.grade.testfiles import hidden_files
from minisandbox.patches import FileChange, parse_patch
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Form, ScriptGrader, Solution, Task
from minisandbox.types import Network
from minisandbox.values import MiB

if TYPE_CHECKING:
    from pathlib import Path

    from minisandbox.images import Image

TIMEOUT = 600.0
_PLACE = PurePosixPath("/run/leaks")
_SHORT = 20
_MOST = 200
_LARGEST = MiB
"""The maximum size in bytes of the files in a task directory whose lines are searched for."""

_SCRIPT = r"""
export GIT_CONFIG_GLOBAL=/run/leaks/gitconfig GIT_CEILING_DIRECTORIES=/ LC_ALL=C.UTF-8
printf '[safe]\n\tdirectory = *\n' > "$GIT_CONFIG_GLOBAL"  # the repository may be another user's
cd "$REPOSITORY"
skipped="-path /proc -o -path /sys -o -path /dev -o -path /run"
[ -z "$HOST" ] || skipped="$skipped -o -path /usr"
if [ -e .git ]; then
    all=$(git cat-file --batch-all-objects --batch-check | wc -l)
    reached=$(git rev-list --objects --all | wc -l)
    commits=$(git rev-list --all --count)
    [ "$commits" = 1 ] || printf 'history\t%s commits\t1\n' "$commits"
    [ "$all" = "$reached" ] || printf 'history\t%s objects that no commit reaches\t1\n' $((all - reached))
    for name in $(git remote) $(git tag) $(git stash list | wc -l | grep -v '^0$'); do
        printf 'history\tremote, tag or stash %s\t1\n' "$name"
    done
    [ ! -d .git/logs ] || printf 'history\treflogs\t1\n'
fi
cd /run/leaks
own=$REPOSITORY/.git text=$(printf '\0a\n' | grep -a a > /dev/null 2>&1 && echo a)
[ -z "$UNCUT" ] || own=/proc
# one walk for archives, and for repositories: files of a history are compressed, and git reads them
find / -xdev \( $skipped -o -path "$own" \) -prune -o -type d -name objects -print0 -o \
    -type f ! -path "$REPOSITORY/*" -regex '.*\.\(whl\|egg\|tar\.gz\|zip\|tar\.bz2\)' -print0 |
    while IFS= read -r -d '' path; do
        [ -d "$path" ] || printf 'archive\t%s\t1\n' "$path"
        folder=${path%/*}
        [ -d "$path" ] && [ -f "$folder/HEAD" ] || continue
        timeout 120 git --git-dir="$folder" cat-file --batch-all-objects --batch --buffer 2> /dev/null |
            grep "-h${text}F" -x -f all | sort -u > history
        for patterns in *.lines; do
            printf '%s\t%s\t%s\thistory\n' "$patterns" "$folder" "$(grep -cF -x -f "$patterns" history)"
        done
    done
# byte-code has no lines, and is half of an environment's files
find / -xdev \( $skipped -o -path "$REPOSITORY/.git" \) -prune -o \
    -type f ! -name '*.pyc' -size -3073k -print0 > files
binary=$(echo | grep -I '' > /dev/null 2>&1 && echo I)
xargs -0 -r grep "-l${binary}F" -x -f all -- < files > suspects || true
for patterns in *.lines; do  # NUMBER.LEAST.lines: how many different lines give the answer away
    least=${patterns#*.} least=${least%.lines}
    tr '\n' '\0' < suspects | xargs -0 -r grep -HcF -x -f "$patterns" -- | while IFS= read -r line; do
        file=${line%:*}
        [ "${line##*:}" -ge "$least" ] || continue  # lines that occur twice count once
        printf '%s\t%s\t%s\n' "$patterns" "$file" "$(grep -hF -x -f "$patterns" -- "$file" | sort -u | wc -l)"
    done
done
exit 0
"""


@dataclass(frozen=True, slots=True)
class Leak:
    """A part of an image that an agent must not see.

    Attributes:
        kind: ``history``, ``reference``, ``tests`` or ``archive``.
        place: the file inside the image, or the part of the history.
        detail: why it is a leak.
    """

    kind: str
    place: str
    detail: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of one file that reveal the solution or the hidden tests.

    Attributes:
        kind: ``reference`` or ``tests``.
        of: the file of the repository that contains the lines.
        lines: the lines.
    """

    kind: str
    of: str
    lines: tuple[str, ...]

    @property
    def enough(self) -> int:
        """The number of lines from which a file is a leak: 95 %, because similar tests share up to 75 % of theirs."""
        return max(1, -(-19 * len(self.lines) // 20))

    def without(self, lines: frozenset[str]) -> Lines:
        """Return the lines without those in the image's own version of the file."""
        return replace(self, lines=tuple(line for line in self.lines if line not in lines))


def find_leaks(task: Task, image: Image) -> tuple[Leak, ...]:
    """Search a task's image for the solution and the hidden tests.

    Args:
        task: the task.
        image: the task's image.

    Returns:
        The leaks, in no particular order.

    Raises:
        GradingError: the search itself failed.
        SandboxCreationError: the sandbox could not be created.
    """
    line_groups = list(telling_lines(task, image.tests_dir()))
    with Sandbox.create(image.spec(), network=Network.off()) as box:
        line_groups = [
            group for original in line_groups if (group := original.without(_lines_of(box, original.of))).lines
        ]
        lines = sorted({line for group in line_groups for line in group.lines})
        box.files.write_bytes(_PLACE / "all", _file(lines))
        for index, group in enumerate(line_groups):
            box.files.write_bytes(_PLACE / f"{index}.{group.enough}.lines", _file(group.lines))
        uncut = "" if task.solution is None else "1"  # a task directory's repository may have a history
        variables = {"REPOSITORY": str(image.workdir), "HOST": "" if image.own_root else "1", "UNCUT": uncut}
        result = box.exec(["bash", "-c", _SCRIPT], user=0, timeout=TIMEOUT, env=variables)
    if not result.ok or result.dropped_stdout:
        raise GradingError(
            f"the image of {task.instance_id} could not be searched for leaks",
            reason=f"{result.fate}: {result.stderr.strip()[-500:]}",
        )
    return tuple(leak for line in result.stdout.splitlines() if (leak := _leak(line, line_groups, task)))


def _file(lines: tuple[str, ...] | list[str]) -> bytes:
    """Return a file of grep patterns that match the lines as they are, or with the + or - of a patch."""
    patterns = [sign + line for sign in ("", "+", "-") for line in lines]
    # add a pattern, because an empty file of patterns matches everything in some versions of grep
    return "\n".join([*patterns, "@no such line@"]).encode("utf-8", "surrogateescape") + b"\n"


def _lines_of(box: Sandbox, path: str) -> frozenset[str]:
    try:
        return frozenset(box.files.read_bytes(path).decode("utf-8", "replace").splitlines())
    except FileAccessError:
        return frozenset()


def telling_lines(task: Task, hidden: Path | None = None) -> Iterator[Lines]:
    """Yield the lines that reveal the solution or the hidden tests: new lines of the reference, lines of the tests.

    Args:
        task: the task.
        hidden: the tests layer of the task's image; if None, tests that only this layer contains are left out.
    """
    for kind, patch, reverse in (("reference", task.patch, task.reference.reverse), ("tests", task.test_patch, False)):
        new_sign, old_sign = (b"-", b"+") if reverse else (b"+", b"-")
        for change in parse_patch(patch):
            common_lines = {*_texts(change, old_sign), *_texts(change, b" ")}
            yield from _distinct(kind, change.path, _texts(change, new_sign), common_lines)
    if task.solution is not None:
        yield from _scripts(task, task.solution)
    if task.form is Form.SWESMITH and hidden is not None:
        for path in task.hidden_files:
            content = hidden_files(hidden, (path,)).get(path, b"").decode("utf-8", "replace")
            yield from _distinct("tests", path, content.splitlines(), set())


def _scripts(task: Task, solution: Solution) -> Iterator[Lines]:
    """Yield the lines of each text file of a task directory's solution and tests."""
    tests = task.grader.files if isinstance(task.grader, ScriptGrader) else None
    for kind, folder in (("reference", solution.files), ("tests", tests)):
        for path in sorted(folder.rglob("*")) if folder is not None else ():
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST:
                content = path.read_bytes().decode("utf-8", "replace")
                yield from _distinct(kind, f"{path.parent.name}/{path.name}", content.splitlines(), set())


def _distinct(kind: str, path: str, lines: list[str], common_lines: set[str]) -> Iterator[Lines]:
    """Yield the lines that are long enough and not common to both versions of the file."""
    distinct_lines = dict.fromkeys(line for line in lines if len(line.strip()) >= _SHORT and line not in common_lines)
    if distinct_lines:
        yield Lines(kind, path, tuple(distinct_lines)[:_MOST])


def _texts(change: FileChange, sign: bytes) -> list[str]:
    return [line.decode("utf-8", "surrogateescape").rstrip("\r") for line in change.signed(sign)]


def _leak(line: str, line_groups: list[Lines], task: Task) -> Leak | None:
    kind, path, count, history = [*line.split("\t"), "", "", ""][:4]
    if task.solution is not None and kind in ("history", "archive"):
        return None  # the author of a task directory chose the content of the image
    if kind == "history":
        return Leak("history", path, "the repository inside is not one commit")
    if kind == "archive":
        name = task.repo.rpartition("/")[2].lower().replace("-", "_")
        is_project = PurePosixPath(path).name.lower().replace("-", "_").startswith(name + "_")
        return Leak("archive", path, "an archive of the project") if is_project else None
    group = line_groups[int(kind.partition(".")[0])]
    if int(count) < group.enough:
        return None
    target = "the reference" if group.kind == "reference" else "the hidden tests"
    return Leak(history or group.kind, path, f"{count} of {len(group.lines)} telling lines of {target} in {group.of}")
