"""Patches: everything that differs, the index untouched, whatever the repository's settings are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from minisandbox.errors import CommandFailed, FileAccessError
from minisandbox.sandbox import Sandbox, handles
from minisandbox.sandbox.drive import converse
from minisandbox.types import ImageSpec, Outcome

pytestmark = pytest.mark.kernel

REPOSITORY = """
set -e
cd /testbed; git init -q; git config user.email a@b; git config user.name n
printf 'one\\ntwo\\nthree\\n' > a.txt; echo gone > gone.txt; printf '\\0\\1\\2' > data.bin; echo x > mode.sh
echo '*.log' > .gitignore; mkdir sub; echo s > sub/s.txt
git add -A; git commit -qm base
"""


@pytest.fixture
def repo(spec: ImageSpec) -> Iterator[Sandbox]:
    """A sandbox with a small repository at /testbed."""
    image = ImageSpec("repo", spec.layers, workdir=PurePosixPath("/testbed"))
    with Sandbox.create(image) as box:
        box.exec(REPOSITORY).check()
        yield box


def test_nothing_changed_is_an_empty_patch(repo: Sandbox) -> None:
    assert repo.patch() == b""


def test_every_kind_of_change_survives_a_round_trip(repo: Sandbox) -> None:
    change = """
set -e
sed -i s/two/TWO/ a.txt; rm gone.txt; printf '\\3\\0\\4' > data.bin; chmod +x mode.sh; echo new > 'new file.txt'
printf '\\377\\0' > new.bin; ln -s a.txt link; : > empty; mv sub/s.txt moved.txt
printf 'caf\\351 no newline' > latin.txt
echo ignored > x.log
"""
    repo.exec(change).check()
    before = repo.exec("git status --porcelain; git diff --cached; find . -path ./.git -prune -o -type f -print").stdout
    patch = repo.patch()
    assert (
        repo.exec("git status --porcelain; git diff --cached; find . -path ./.git -prune -o -type f -print").stdout
        == before
    )
    listing = r"""
rm -f x.log; find . -path ./.git -prune -o -not -type d -print | sort | xargs -d '
' stat -c '%n %A %s'
cat a.txt data.bin latin.txt | sha256sum
"""
    changed = repo.exec(listing).stdout
    assert b"x.log" not in patch
    repo.exec("git reset -q --hard; git clean -fdqx").check()
    repo.files.write_bytes("/tmp/p", patch)
    repo.exec("git apply --whitespace=nowarn /tmp/p").check()
    assert repo.exec(listing).stdout == changed


def test_commits_of_the_agent_count_with_the_images_commit(repo: Sandbox) -> None:
    base = repo.exec("git rev-parse HEAD").stdout.strip()
    repo.exec("echo c > c.txt; git add c.txt; git commit -qm agent; echo d > d.txt").check()
    assert b"c.txt" not in repo.patch()
    assert b"c.txt" in repo.patch(base=base)
    assert b"d.txt" in repo.patch(base=base)


def test_settings_of_the_repository_do_not_shape_the_patch(repo: Sandbox) -> None:
    repo.exec("""
set -e
git config diff.noprefix true; git config diff.external /bin/false; git config color.ui always
git config diff.renames copies; git config core.autocrlf true; git config core.quotePath false
git config diff.x.textconv 'tr a-z A-Z <'; echo '*.txt diff=x' > .git/info/attributes; sed -i s/two/2/ a.txt
""").check()
    patch = repo.patch()
    assert patch.startswith(b"diff --git a/a.txt b/a.txt\n")
    assert b"-two\n+2\n" in patch
    assert b"\x1b" not in patch


def test_a_destroyed_repository_is_an_error(repo: Sandbox) -> None:
    repo.exec("rm -rf .git")
    with pytest.raises(CommandFailed, match="not a git repository"):
        repo.patch()


def test_a_patch_larger_than_the_limit_is_an_error(repo: Sandbox) -> None:
    repo.exec("seq 100000 > big.txt").check()
    with pytest.raises(FileAccessError, match="larger than 1000 bytes"):
        repo.patch(limit=1000)
    assert len(repo.patch(limit=10_000_000)) > 500_000


def test_who_is_interrupted_can_let_go_of_a_patch_at_any_call(repo: Sandbox) -> None:
    for carried_out in range(3):
        operation = handles.make_patch(repo._core, None, base=None, limit=None, timeout=None)
        for _ in range(carried_out):
            with repo._core.open_job() as connection:
                converse(next(operation), connection)
        next(operation)
        operation.close()


def round_trip(repo: Sandbox, patch: bytes) -> str:
    """Apply a patch to the clean base and list every file with its content."""
    repo.exec("git reset -q --hard; git clean -fdqx; find . -mindepth 2 -name .git -exec rm -rf {} +; git clean -fdqx")
    repo.exec(["git", "apply", "--binary", "-"], stdin=patch).check()
    return repo.exec("find . -path ./.git -prune -o -type f -print | sort | xargs -d '\n' sha256sum").check().stdout


def test_repositories_made_inside_come_along_as_their_files(repo: Sandbox) -> None:
    repo.exec(
        "set -e; mkdir -p lib/new; git init -q lib/new; echo body > 'lib/new/a b.py'; ln -s 'a b.py' lib/new/link;"
        "git init -q empty; git init -q cloned; cd cloned; git config user.email a@b; git config user.name n;"
        "echo one > committed; git add -A; git commit -qm x; echo two > fresh;"
        "mkdir deep; git init -q deep; echo d > deep/f;"
        "cd ..; git init -q sub; rm sub/s.txt; echo t > sub/t.txt"
    ).check()
    patch = repo.patch()
    assert b"Subproject" not in patch
    listed = round_trip(repo, patch)
    for name in ("lib/new/a b.py", "cloned/committed", "cloned/fresh", "cloned/deep/f", "sub/t.txt"):
        assert f"./{name}\n" in listed
    assert "sub/s.txt" not in listed
    assert repo.exec(["readlink", "lib/new/link"]).stdout == "a b.py\n"


def test_repositories_in_ignored_directories_stay_out(repo: Sandbox) -> None:
    repo.exec("echo venv/ >> .gitignore; mkdir -p venv/src/x; git init -q venv/src/x; echo x > venv/src/x/f").check()
    patch = repo.patch()
    assert b".gitignore" in patch
    assert b"venv/src" not in patch


def test_submodules_of_the_base_are_left_out(repo: Sandbox) -> None:
    repo.exec(
        "set -e; git init -q /tmp/other; cd /tmp/other; git config user.email a@b; git config user.name n; echo 1 > f;"
        "git add -A; git commit -qm 1; cd /testbed;"
        "git -c protocol.file.allow=always submodule --quiet add /tmp/other dep;"
        "git commit -qm with-submodule; cd dep; git config user.email a@b; git config user.name n; echo 2 > f;"
        "git commit -qam 2; cd ..; echo more >> a.txt"
    ).check()
    patch = repo.patch()
    assert b"a/a.txt" in patch
    assert b"dep" not in patch


def test_a_mode_change_and_a_rename_are_carried(repo: Sandbox) -> None:
    repo.exec(
        "git config core.fileMode false; chmod +x a.txt; git mv gone.txt here.txt; mv mode.sh 'm o d e.sh'"
    ).check()
    patch = repo.patch()
    assert b"old mode 100644\nnew mode 100755" in patch
    listed = round_trip(repo, patch)
    assert "./here.txt\n" in listed
    assert "./m o d e.sh\n" in listed
    assert "./gone.txt\n" not in listed
    assert repo.exec("test -x a.txt").ok


def test_loops_of_links_names_of_another_case_and_line_ends_survive_a_round_trip(repo: Sandbox) -> None:
    repo.exec(r"""
set -e
printf '*.bat text eol=crlf\n*.raw -text\n' > .gitattributes; echo up > Name.py
printf 'a\r\nb\r\n' > run.bat; printf 'a\r\nb\n' > mixed.raw
git add -A; git commit -qm more
""").check()
    repo.exec(r"""
set -e
ln -s loop loop; ln -s ../.. up; mkdir self; ln -s . self/again
mv Name.py name.py; echo other > NAME.py
printf 'c\r\n' >> run.bat; printf 'c\r\nd' >> mixed.raw; printf 'only\r\n' > new.bat; printf 'x\ry\n' > new.raw
""").check()
    listing = (
        r"find . -path ./.git -prune -o -printf '%p %y %l\n' | sort; "
        "sha256sum run.bat mixed.raw new.bat new.raw name.py NAME.py"
    )
    before = repo.exec(listing).check().stdout
    patch = repo.patch()
    repo.exec("git reset -q --hard; git clean -fdqx").check()
    repo.exec(["git", "apply", "--whitespace=nowarn", "-"], stdin=patch).check()
    assert repo.exec(listing).check().stdout == before


def test_a_git_that_hangs_leaves_nothing_behind(repo: Sandbox) -> None:
    repo.exec(
        "git config filter.slow.clean 'sleep 600'; echo '*.txt filter=slow' > .gitattributes; echo x > a.txt"
    ).check()
    with pytest.raises(CommandFailed, match="timed out"):
        repo.patch(timeout=1)
    assert repo.exec("ls -A /tmp").stdout == ""


@pytest.mark.parametrize("name", [".git/config", ".git/info/exclude"])
def test_a_fifo_in_place_of_a_file_of_git_costs_the_timeout_and_no_more(repo: Sandbox, name: str) -> None:
    repo.exec(f"rm -f {name}; mkfifo {name}").check()
    with pytest.raises(CommandFailed, match=r"'git diff': timed out after 2.*FIFO") as caught:
        repo.patch(timeout=2)
    assert caught.value.result.outcome is Outcome.TIMEOUT
    assert repo.exec("pgrep -c git").stdout == "0\n"
    assert repo.exec("ls -A /tmp").stdout == ""
