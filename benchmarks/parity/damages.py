"""Damaged patches, and what the harnesses' own commands make of them, run as they are on a checkout."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

SWEBENCH_4 = ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
"""``GIT_APPLY_CMDS`` of swebench 4.1.0 and swesmith 0.0.9."""
SWEBENCH_5 = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""Those of swebench 5.0.2, which restores the tree between two of them."""
TREE = """\
git ls-files -o -z -- '*.orig' '*.rej' | xargs -0 -r rm -f --
export GIT_INDEX_FILE=$(mktemp -u)
git read-tree "$1" && git -c core.autocrlf=false -c core.fileMode=true add -A -f . && echo "tree $(git write-tree)"
rm -f "$GIT_INDEX_FILE"
"""
"""Prints the hash of all files of a work tree, ignored ones included, without what ``patch`` and ``--reject`` leave."""
_HUNK = re.compile(rb"^@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@", re.MULTILINE)
_BINARY = b"""\
diff --git a/data.bin b/data.bin
new file mode 100644
index 0000000000000000000000000000000000000000..eaf36c1daccfdf325514461cd1a2ffbc139b5464
GIT binary patch
literal 4
LcmZQzWMT#Y01f~L

literal 0
HcmV?d00001

"""
Damage = Callable[[bytes, Path], bytes]


def harness(tree: Path, patch: bytes, file: Path, *, five: bool = False) -> str:
    """Apply a patch to a checkout as the harness does; return the command that did, or "".

    Args:
        tree: the checkout, which is changed.
        patch: the text of the prediction.
        file: where it is written for the commands, as the harness writes it.
        five: whether swebench 5 does it.
    """
    file.write_bytes(patch)
    for number, command in enumerate(SWEBENCH_5 if five else SWEBENCH_4):
        if number and five:
            _shell("git checkout -- . ; git clean -fd", tree)
        if _shell(f"{command} {file}", tree) == 0:
            return command
    check = "git apply --check --reverse"
    return check if five and _shell(f"{check} {file}", tree) == 0 else ""


def _shell(command: str, tree: Path) -> int:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, shell=True, cwd=tree, env=environment, capture_output=True, check=False).returncode


def tree_of(tree: Path, base: str) -> str:
    """Return the hash of a checkout's files."""
    done = subprocess.run(["bash", "-c", TREE, "tree", base], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


# --- damages ---------------------------------------------------------------------------------------------------------


def _lines(patch: bytes) -> list[bytes]:
    return patch.splitlines(keepends=True)


def _is_context(line: bytes) -> bool:
    return line.startswith(b" ") or line == b"\n"


def _numbers(patch: bytes, change: Callable[[int, int, int, int], tuple[int, int, int, int]], count: int = 0) -> bytes:
    def new(match: re.Match[bytes]) -> bytes:
        old, olds, new, news = (int((part or b"1").strip(b",")) for part in match.groups())
        return b"@@ -%d,%d +%d,%d @@" % change(old, olds, new, news)

    return _HUNK.sub(new, patch, count=count)


def _edge_context(patch: bytes, depth: int, edit: Callable[[bytes], bytes | None]) -> bytes:
    """Edit the outermost lines of context of each hunk, ``depth`` at either end."""
    result: list[bytes] = []
    for part in re.split(rb"(?m)^(?=@@ -|diff --git )", patch):
        lines = _lines(part)
        if not part.startswith(b"@@ -"):
            result += lines
            continue
        body = range(1, len(lines))
        first = next((at for at in body if not _is_context(lines[at])), len(lines))
        last = next((at for at in reversed(body) if not _is_context(lines[at])), 0)
        edges = {*range(1, min(first, 1 + depth)), *range(max(last + 1, len(lines) - depth), len(lines))}
        result += [new for at, line in enumerate(lines) if (new := edit(line) if at in edges else line) is not None]
    return b"".join(result)


def _fuzz(depth: int) -> Damage:
    return lambda patch, _: _edge_context(patch, depth, lambda line: line.rstrip(b"\n") + b" # other\n")


def _last_hunk_fuzzy(patch: bytes, tree: Path) -> bytes:
    """Damage the context of the last hunk alone."""
    start = patch.rindex(b"\n@@ -") + 1
    return patch[:start] + _fuzz(1)(patch[start:], tree)


def _applied_hunk(patch: bytes, _: Path) -> bytes:
    """Repeat the first hunk, so that it is already applied when it comes again."""
    parts = re.split(rb"(?m)^(?=@@ -|diff --git )", patch)
    at = next((number for number, part in enumerate(parts) if part.startswith(b"@@ -")), 0)
    return b"".join([*parts[: at + 1], parts[at], *parts[at + 1 :]]) if at else patch


def _reversed(patch: bytes, _: Path) -> bytes:
    """Exchange added and removed lines."""
    signs = {b"+": b"-", b"-": b"+"}
    result = []
    for line in _lines(patch):
        is_content = line[:1] in signs and not line.startswith((b"--- ", b"+++ "))
        result.append(signs[line[:1]] + line[1:] if is_content else line)
    return _numbers(b"".join(result), lambda old, olds, new, news: (new, news, old, olds))


def _unrelated_file(tree: Path) -> str:
    names = subprocess.run(["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True).stdout.split("\n")
    usual = (name for name in names if re.fullmatch(r"[A-Za-z][\w./-]+\.(rst|md|txt|py)", name) and "test" not in name)
    return next(name for name in usual if (tree / name).is_file() and (tree / name).stat().st_size)


def _mode(patch: bytes, tree: Path) -> bytes:
    name = _unrelated_file(tree).encode()
    return b"diff --git a/%s b/%s\nold mode 100644\nnew mode 100755\n" % (name, name) + patch.rstrip(b"\n")


def _rename(patch: bytes, tree: Path) -> bytes:
    name = _unrelated_file(tree).encode()
    head = b"diff --git a/%s b/%s.moved\nsimilarity index 100%%\n" % (name, name)
    return head + b"rename from %s\nrename to %s.moved\n" % (name, name) + patch.rstrip(b"\n")


def _no_git_headers(patch: bytes, _: Path) -> bytes:
    kept = [line for line in _lines(patch) if not line.startswith((b"diff --git ", b"index "))]
    return b"".join(kept)


def _link(patch: bytes, tree: Path) -> bytes:
    return (
        b"diff --git a/a-link b/a-link\nnew file mode 120000\nindex 0000000..1234567\n--- /dev/null\n+++ b/a-link\n"
        b"@@ -0,0 +1 @@\n+" + _unrelated_file(tree).encode() + b"\n\\ No newline at end of file\n"
    ) + patch


def _added(name: bytes, after_name: bytes = b"") -> bytes:
    """Return the patch of a new file; the name is quoted or not, as git writes it."""
    old, new = ((b'"%s/' % side + name[1:]) if name.startswith(b'"') else side + b"/" + name for side in (b"a", b"b"))
    head = b"diff --git %s %s\nnew file mode 100644\n--- /dev/null\n+++ %s%s\n" % (old, new, new, after_name)
    return head + b"@@ -0,0 +1 @@\n+x = 1\n"


DAMAGES: Mapping[str, Damage] = {
    "clean": lambda patch, _: patch,
    "no final newline": lambda patch, _: patch.rstrip(b"\n"),
    "ends stripped": lambda patch, _: patch.strip(),
    "trailing blanks trimmed": lambda patch, _: re.sub(rb"[ \t]+(?=\n)", b"", patch),
    "CRLF": lambda patch, _: patch.replace(b"\n", b"\r\n"),
    "CRLF in content": lambda patch, _: re.sub(rb"(?m)^([ +-](?!-- |\+\+ ).*)$", rb"\1\r", patch),
    "CRLF in added lines": lambda patch, _: re.sub(rb"(?m)^(\+(?!\+\+ ).*)$", rb"\1\r", patch),
    "counts too high": lambda patch, _: _numbers(patch, lambda o, m, n, k: (o, m + 1, n, k + 1)),
    "counts too low": lambda patch, _: _numbers(patch, lambda o, m, n, k: (o, max(m - 1, 0), n, max(k - 1, 0))),
    "count of one side wrong": lambda patch, _: _numbers(patch, lambda o, m, n, k: (o, m, n, k + 2), 1),
    "no counts": lambda patch, _: _HUNK.sub(rb"@@ -\1 +\3 @@", patch),
    "no numbers": lambda patch, _: _HUNK.sub(b"@@ ... @@", patch),
    "lines shifted": lambda patch, _: _numbers(patch, lambda o, m, n, k: (o + 7, m, n + 7, k)),
    "lines beyond the end": lambda patch, _: _numbers(patch, lambda o, m, n, k: (o + 99999, m, n + 99999, k)),
    "lines all 1": lambda patch, _: _numbers(patch, lambda *counts: (1, counts[1], 1, counts[3])),
    "context cut, counts kept": lambda patch, _: _edge_context(patch, 2, lambda _: None),
    "one hunk twice": _applied_hunk,
    "reversed": _reversed,
    **{f"fuzz {depth}": _fuzz(depth) for depth in range(1, 6)},
    "fuzz 1 in the last hunk": _last_hunk_fuzzy,
    "tabs for blanks": lambda patch, _: re.sub(
        rb"(?m)^([ +-])((?:    )+)", lambda m: m[1] + b"\t" * (len(m[2]) // 4), patch
    ),
    "indented": lambda patch, _: b"".join(b"  " + line for line in _lines(patch)),
    "fenced": lambda patch, _: b"```diff\n" + patch + b"```\n",
    "prose around it": lambda patch, _: b"Here is the fix:\n\n" + patch + b"\nIt adds what was missing.\n",
    "no prefix": lambda patch, _: re.sub(
        rb"(?m)^(--- |\+\+\+ )[ab]/", rb"\1", re.sub(rb"(?m)^diff --git a/(\S+) b/", rb"diff --git \1 ", patch)
    ),
    "doubled": lambda patch, _: patch + patch,
    "truncated": lambda patch, _: patch[
        : len(patch) - len(_lines(patch)[-1]) // 2 - sum(map(len, _lines(patch)[-3:-1]))
    ],
    "no git headers": _no_git_headers,
    "no headers at all": lambda patch, _: patch[patch.index(b"@@") :],
    "blank lines at the end": lambda patch, _: patch.rstrip(b"\n") + b"\n\n\n\n",
    "blank lines between hunks": lambda patch, _: re.sub(rb"(?m)^(?=@@ )", b"\n", patch),
    "binary file, trimmed": lambda patch, _: _BINARY + patch.rstrip(b"\n"),
    "binary file at the end, trimmed": lambda patch, _: patch + _BINARY.rstrip(b"\n"),
    "mode, trimmed": _mode,
    "rename, trimmed": _rename,
    "link": _link,
    "link, trimmed": lambda patch, tree: _link(patch, tree).rstrip(b"\n"),
    "unknown file": lambda patch, _: patch + b"--- a/no/such.py\n+++ b/no/such.py\n@@ -1 +1 @@\n-a\n+b\n",
    "new file, trimmed": lambda patch, _: patch + _added(b"added.py").rstrip(b"\n"),
    "name ends in a blank": lambda patch, _: _added(b"ends in a blank ", b"\t") + patch,
    "name of odd bytes": lambda patch, _: _added(b'"tab\\t\\"q\\"\\377.txt"') + patch,
    "name of odd bytes, trimmed": lambda patch, _: patch + _added(b'"a\\nb\\303\\251"').rstrip(b"\n"),
    "ignored file, trimmed": lambda patch, _: _added(b"fresh.ignored") + patch.rstrip(b"\n"),
    "only blanks": lambda *_: b"\n \n",
    "no patch": lambda *_: b"I could not fix it.\n",
}
"""What happens to patches on their way, from what the field's agents, editors, forms and scripts do to them."""


def damaged(patch: bytes, tree: Path, names: Sequence[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield the name and text of each damaged patch that differs from the patch."""
    for name, damage in DAMAGES.items():
        text = damage(patch, tree)
        if (not names or name in names) and (text != patch or name == "clean"):
            yield name, text
