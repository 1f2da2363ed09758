"""patch(): what a repository's work tree says, whatever its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import case, raises

from minisandbox.errors import CommandFailed, FileAccessError

if TYPE_CHECKING:
    from minisandbox.sandbox import AsyncSandbox

REPOSITORY = r"""
set -e
git init -q .; git config user.email a@b; git config user.name n
printf 'one\ntwo\nthree\n' > a.txt; echo gone > gone.txt; printf '\0\1\2' > data.bin; echo x > mode.sh
echo '*.log' > .gitignore; mkdir sub; echo s > sub/s.txt; seq 100 > long.txt
git add -A; git commit -qm base
"""
LISTING = r"""
rm -f x.log; find . -path ./.git -prune -o -not -type d -printf '%P %m %y %l\n' | sort
find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum
"""


async def repository(box: AsyncSandbox) -> None:
    """A small repository in the workdir."""
    (await box.exec(REPOSITORY)).check()


@case("nothing changed is an empty patch")
async def case_nothing(box: AsyncSandbox) -> None:
    await repository(box)
    assert await box.patch() == b""


@case("new, deleted, renamed, binary, mode-changed and linked files come back from the patch")
async def case_round_trip(box: AsyncSandbox) -> None:
    await repository(box)
    (await box.exec(r"""
set -e
sed -i s/two/TWO/ a.txt; rm gone.txt; printf '\3\0\4' > data.bin; chmod +x mode.sh; echo new > 'new file.txt'
printf '\377\0' > new.bin; ln -s a.txt link; : > empty; mv sub/s.txt moved.txt; mv long.txt longer.txt
printf 'caf\351 no newline' > latin.txt; echo odd > $'caf\303\251\t"'; mkdir -p deep/er; echo d > deep/er/f
echo ignored > x.log; rm a.txt; ln -s mode.sh a.txt
""")).check()  # fmt: skip
    patch = await box.patch()
    assert b"x.log" not in patch
    changed = (await box.exec(LISTING)).stdout_bytes
    (await box.exec("git reset -q --hard; git clean -fdqx")).check()
    await box.files.write_bytes(".git/p", patch)
    (await box.exec("git apply --whitespace=nowarn .git/p")).check()
    assert (await box.exec(LISTING)).stdout_bytes == changed


@case("index, stash and work tree stay as they are")
async def case_index_untouched(box: AsyncSandbox) -> None:
    await repository(box)
    await box.exec("echo staged > staged; git add staged; echo more >> staged; echo unstaged >> a.txt; rm gone.txt")
    look = "git status --porcelain; git diff --cached; git diff; git ls-files -s; git stash list; ls -A .git"
    before = (await box.exec(look)).stdout_bytes
    assert b"more" in await box.patch()
    assert (await box.exec(look)).stdout_bytes == before


@case("commits since the base count with the base, not without")
async def case_base(box: AsyncSandbox) -> None:
    await repository(box)
    base = (await box.exec("git rev-parse HEAD")).stdout.strip()
    (await box.exec("echo c > c.txt; git add c.txt; git commit -qm agent; echo d > d.txt")).check()
    assert b"c.txt" not in await box.patch()
    patch = await box.patch(base=base)
    assert b"c.txt" in patch
    assert b"d.txt" in patch


@case("settings, attributes and hooks of the repository do not shape the patch")
async def case_settings(box: AsyncSandbox) -> None:
    await repository(box)
    (
        await box.exec("""
set -e
git config diff.noprefix true; git config diff.external /bin/false; git config color.ui always
git config diff.renames copies; git config core.autocrlf true; git config core.quotePath false
git config diff.context 0; git config diff.interHunkContext 9; git config diff.algorithm patience
git config core.fsmonitor ./evil; printf '#!/bin/sh\\ntouch ran' > evil; chmod +x evil; echo evil >> .git/info/exclude
git config diff.x.textconv 'tr a-z A-Z <'; echo '*.txt diff=x' > .git/info/attributes; sed -i s/two/2/ a.txt
""")
    ).check()
    patch = await box.patch()
    assert patch.startswith(b"diff --git a/a.txt b/a.txt\n")
    assert b" one\n-two\n+2\n three\n" in patch
    assert b"\x1b" not in patch
    assert not await box.files.exists("ran")


@case("a nested repository is no surprise: its files are in the patch, or it is left out, and nothing fails")
async def case_nested_repository(box: AsyncSandbox) -> None:
    await repository(box)
    (await box.exec(
        "git init -q inner; cd inner; git config user.email a@b; git config user.name n; echo i > inside; git add .;"
        "git commit -qm inner; cd ..; git init -q bare-inner; echo x > a.txt"
    )).check()  # fmt: skip
    patch = await box.patch()
    assert b"a/a.txt" in patch
    await box.files.write_bytes(".git/p", patch)
    (await box.exec("git reset -q --hard; rm -rf inner bare-inner; git apply .git/p")).check()
    assert (await box.exec("cat a.txt")).stdout == "x\n"


@case("a repository below the workdir is named by its path")
async def case_path(box: AsyncSandbox) -> None:
    (await box.exec(f"mkdir here; cd here; {REPOSITORY}\necho changed > a.txt")).check()
    assert b"changed" in await box.patch("here")
    assert b"changed" in await box.patch(box.image.workdir / "here")


@case("no repository, a destroyed one, or no such base is an error that says so")
async def case_no_repository(box: AsyncSandbox) -> None:
    with raises(CommandFailed, "not a git repository"):
        await box.patch()
    await repository(box)
    with raises(CommandFailed):
        await box.patch(base="no-such-commit")
    with raises(FileAccessError):
        await box.patch("no/such")


@case("a patch larger than the limit is an error; a large one is whole")
async def case_limit(box: AsyncSandbox) -> None:
    await repository(box)
    (await box.exec("seq 400000 > big.txt")).check()
    with raises(FileAccessError, "larger than 1000 bytes"):
        await box.patch(limit=1000)
    assert len(await box.patch(limit=10_000_000)) > 2_500_000


@case("a patch leaves nothing behind")
async def case_leaves_nothing(box: AsyncSandbox) -> None:
    await repository(box)
    await box.exec("echo x > a.txt")
    before = (await box.exec("ls -A ${TMPDIR:-/tmp} .git .")).stdout
    for _ in range(3):
        assert await box.patch()
    assert (await box.exec("ls -A ${TMPDIR:-/tmp} .git .")).stdout == before
