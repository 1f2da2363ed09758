"""Patches: everything that differs, the index untouched, whatever the repository's settings are."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import CommandFailed, FileAccessError
from minisandbox.launch.jobs.frames import Header
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.comparing import ChangesCall
from minisandbox.sandbox.io_sync import carry_out, converse
from minisandbox.sandbox.protocol import patching
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import ImageSpec, Mount, Outcome

pytestmark = pytest.mark.kernel

REPOSITORY = """
set -e
cd /testbed; git init -q; git config user.email a@b; git config user.name n
printf 'one\\ntwo\\nthree\\n' > a.txt; echo gone > gone.txt; printf '\\0\\1\\2' > data.bin; echo x > mode.sh
echo '*.log' > .gitignore; mkdir sub; echo s > sub/s.txt
git add -A; git commit -qm base
"""


@contextmanager
def repository_made_inside(spec: ImageSpec) -> Iterator[Sandbox]:
    """A sandbox that made a small repository at /testbed itself."""
    with Sandbox.create(ImageSpec("repo", spec.layers, workdir=PurePosixPath("/testbed"))) as box:
        box.exec(REPOSITORY).check()
        yield box


@contextmanager
def repository_of_image(spec: ImageSpec, place: Path) -> Iterator[Sandbox]:
    """A sandbox whose image has the same repository."""
    upper = place / "upper"
    upper.mkdir()
    image = ImageSpec("repo", spec.layers, workdir=PurePosixPath("/testbed"))
    try:
        with Sandbox.create(image, upper=upper) as box:
            commit = box.exec(REPOSITORY + "git rev-parse HEAD").check().stdout.strip()
        with Sandbox.create(
            replace(image, layers=(*spec.layers, upper / "tree"), base_commit=commit, clean=True)
        ) as box:
            yield box
    finally:
        remove_tree(upper)


@pytest.fixture(params=["made inside", "of the image"])
def repo(request: pytest.FixtureRequest, spec: ImageSpec, tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox with the repository: all of it, or what was written since, becomes a patch."""
    inside = request.param == "made inside"
    with repository_made_inside(spec) if inside else repository_of_image(spec, tmp_path) as box:
        yield box


@pytest.fixture
def clean(spec: ImageSpec, tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox whose image has the repository."""
    with repository_of_image(spec, tmp_path) as box:
        yield box


def patch_of(box: Sandbox, limit: int | None = None) -> bytes:
    """The patch: what git says that looks at what was written is what it says that looks at everything."""
    patch = box.patch(limit=limit)
    assert patch == carry_out(box._core, patching.make_patch(box._core, None, None, base=None, limit=None, timeout=60))
    return patch


def written(box: Sandbox) -> tuple[set[str], set[str]] | None:
    """What git looks at for a patch: paths that are there, paths that are gone."""
    found = patching.find_written(box._core, None, base=None, timeout=None)
    return None if found is None else (set(found.existing), set(found.deleted))


def test_nothing_changed_is_an_empty_patch(repo: Sandbox) -> None:
    assert patch_of(repo) == b""


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
    patch = patch_of(repo)
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
    assert (b"c.txt" in patch_of(repo)) == repo.image.clean  # the image's commit, or else HEAD
    assert b"c.txt" in repo.patch(base=base)
    assert b"d.txt" in repo.patch(base=base)


def test_settings_of_the_repository_do_not_shape_the_patch(repo: Sandbox) -> None:
    repo.exec("""
set -e
git config diff.noprefix true; git config diff.external /bin/false; git config color.ui always
git config diff.renames copies; git config core.autocrlf true; git config core.quotePath false
git config diff.x.textconv 'tr a-z A-Z <'; echo '*.txt diff=x' > .git/info/attributes; sed -i s/two/2/ a.txt
""").check()
    patch = patch_of(repo)
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
        operation = patching.make_patch(repo._core, None, None, base=None, limit=None, timeout=None)
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
    patch = patch_of(repo)
    assert b"Subproject" not in patch
    listed = round_trip(repo, patch)
    for name in ("lib/new/a b.py", "cloned/committed", "cloned/fresh", "cloned/deep/f", "sub/t.txt"):
        assert f"./{name}\n" in listed
    assert "sub/s.txt" not in listed
    assert repo.exec(["readlink", "lib/new/link"]).stdout == "a b.py\n"


def test_repositories_in_ignored_directories_stay_out(repo: Sandbox) -> None:
    repo.exec("echo venv/ >> .gitignore; mkdir -p venv/src/x; git init -q venv/src/x; echo x > venv/src/x/f").check()
    patch = patch_of(repo)
    assert b".gitignore" in patch
    assert b"venv/src" not in patch


def test_edits_inside_submodules_are_carried_and_their_commits_are_not(repo: Sandbox) -> None:
    """Also inside a submodule's own submodule, below a path with a blank; ignored files stay out, as elsewhere."""
    repo.exec(
        "set -e; export GIT_CONFIG_COUNT=3 GIT_CONFIG_KEY_0=user.name GIT_CONFIG_VALUE_0=n GIT_CONFIG_KEY_1=user.email"
        " GIT_CONFIG_VALUE_1=a@b GIT_CONFIG_KEY_2=protocol.file.allow GIT_CONFIG_VALUE_2=always;"
        "for name in inner outer; do git init -q /tmp/$name; cd /tmp/$name; echo 1 > f; echo '*.log' > .gitignore;"
        "if [ $name = outer ]; then git submodule --quiet add /tmp/inner inner; fi; git add -A; git commit -qm 1; done;"
        "cd /testbed; git submodule --quiet add /tmp/outer 'a dep'; git submodule --quiet add /tmp/inner empty;"
        "git submodule --quiet update --init --recursive; git commit -qm with-submodules; rm -rf empty;"
        "mkdir /tmp/clean; git archive HEAD | tar x -C /tmp/clean; for path in 'a dep' 'a dep/inner'; do"
        '  git -C "$path" archive HEAD | tar x -C "/tmp/clean/$path"; done;'
        "cd 'a dep'; echo 2 > f; git commit -qam 2; echo new > new.py; echo x > x.log; echo 2 > inner/f;"
        "rm inner/.gitignore; cd ..; echo more >> a.txt"
    ).check()
    patch = repo.patch(base="HEAD")
    changed = {line.split(b" b/")[-1].rstrip(b'"') for line in patch.splitlines() if line.startswith(b"diff --git")}
    names = (b"a.txt", b"a dep/f", b"a dep/new.py", b"a dep/inner/f", b"a dep/inner/.gitignore")
    assert changed == set(names)
    assert b"Subproject" not in patch
    repo.files.write_bytes("/tmp/patch", patch)
    repo.exec("cd /tmp/clean && git apply /tmp/patch && cd /testbed && rm -rf empty").check()
    same = "cd /tmp/clean && for f in a.txt 'a dep/f' 'a dep/new.py' 'a dep/inner/f'; do cmp $f /testbed/$f; done"
    repo.exec(same.replace("$f", '"$f"', 1).replace("/testbed/$f", '"/testbed/$f"')).check()


def test_a_mode_change_and_a_rename_are_carried(repo: Sandbox) -> None:
    repo.exec(
        "git config core.fileMode false; chmod +x a.txt; git mv gone.txt here.txt; mv mode.sh 'm o d e.sh'"
    ).check()
    patch = patch_of(repo)
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
    patch = repo.patch(base="HEAD")
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


# --- what was written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "there", "gone"),
    [
        ("touch a.txt; mkdir empty; mkfifo pipe; echo out > /tmp/x; echo x > /home/x", "", ""),
        (
            "echo x > new; echo x >> a.txt; rm gone.txt; ln -s x link; echo x > x.log",
            "new a.txt link x.log",
            "gone.txt",
        ),
        ("rm -r sub; echo x > sub", "sub", "sub/s.txt"),
        ("mv sub other; git add -A; git commit -qm other; git branch more", "other/s.txt", "sub/s.txt"),
        ("rm gone.txt; mv sub other; git add -A; git stash -q; git log; git status", "", ""),
        ("chmod +x a.txt; chmod 600 data.bin", "a.txt data.bin", ""),
    ],
)
def test_git_looks_at_what_was_written(clean: Sandbox, change: str, there: str, gone: str) -> None:
    clean.exec(f"set -e; {change}").check()
    assert written(clean) == (set(there.split()), set(gone.split()))
    patch_of(clean)


@pytest.mark.parametrize(
    "change",
    [
        "rm .gitignore",
        "echo '*.py text' > sub/.gitattributes",
        "git config core.ignoreCase true",
        "echo x >> .git/info/exclude",
        "git init -q inside",
        "git gc -q --prune=now",
        "rm a.txt; mkdir a.txt; echo x > a.txt/b",
        "chmod 700 sub",
        "cp -a /testbed /tmp/t; cd /; rm -rf /testbed; ln -s /tmp/t /testbed",
        "for n in $(seq 3000); do echo > a-name-of-some-length-$n; done",
    ],
)
def test_git_looks_at_everything_where_more_than_files_was_changed(clean: Sandbox, change: str) -> None:
    clean.exec(f"set -e; {change}").check()
    assert written(clean) is None
    patch_of(clean)


def test_what_was_written_elsewhere_is_not_compared(clean: Sandbox) -> None:
    clean.exec("echo > new; echo > /home/elsewhere; touch /usr/local/elsewhere || true").check()
    changes = clean._core.changes(PurePosixPath("/testbed"), None)
    assert [str(change.path) for change in changes] == ["/testbed/new"]
    assert any(change.path.name == "elsewhere" for change in clean.changes())


@pytest.mark.slow
@pytest.mark.parametrize("place", [".", ".git/objects/ab"])
def test_who_writes_very_many_files_has_nobody_look_at_them_all(
    clean: Sandbox, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    clean.exec(f"mkdir -p {place}; cd {place}; for n in $(seq 20000); do echo > file-$n; done", timeout=120).check()
    looked: list[int] = []
    answer = ChangesCall._answer

    def count(call: ChangesCall, header: Header, payload: bytes) -> None:
        answer(call, header, payload)
        looked.append(len(call._changes))

    monkeypatch.setattr(ChangesCall, "_answer", count)
    assert written(clean) is None
    assert max(looked) < 20000
    assert len(clean.changes()) >= 20000
    patch_of(clean)


def test_git_looks_at_everything_below_mounts_of_other_repositories_and_of_other_commits(
    clean: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "file").write_text("shown\n")
    mount = Mount(tmp_path / "shown", PurePosixPath("/testbed/sub"))
    with Sandbox.create(clean.image, mounts=[mount]) as box:
        assert written(box) is None
        assert b"sub/file" in patch_of(box)
        box.reset(box.snapshot())
    commit = clean.exec("echo 2 > new; git add new; git commit -qm two; git rev-parse HEAD").check().stdout.strip()
    assert patching.find_written(clean._core, "/testbed", base=commit, timeout=None) is None
    assert patching.find_written(clean._core, "/tmp", base=None, timeout=None) is None
    assert clean.patch(base=commit) == b""
    assert b"+2" in clean.patch("/testbed")
    with Sandbox.attach(clean.id) as attached:
        assert attached.patch() == clean.patch()


def test_what_git_cannot_take_is_left_out_both_ways(clean: Sandbox) -> None:
    name = "d" * 200
    clean.exec(
        f"set -e; for n in $(seq 40); do mkdir {name}; cd {name}; done; echo x > deep; cd /testbed; echo x > new"
    ).check()
    assert written(clean) is not None
    assert b"b/new" in patch_of(clean)


@pytest.mark.parametrize("name", [":(exclude)*", ":!*", ":^x", ":", "--", "-n", "*", "@", "[", "a\\", "$(x)", '"'])
def test_no_name_of_a_file_says_more_than_the_file(clean: Sandbox, name: str) -> None:
    clean.exec(["bash", "-c", 'echo new > other; rm -rf -- "$1"; echo new > "./$1"', "make", name]).check()
    assert written(clean) == ({"other", name}, set())
    assert patch_of(clean).count(b"diff --git") == 2


def test_a_sealed_change_is_one(clean: Sandbox) -> None:
    clean.exec("echo sealed > new; rm gone.txt").check()
    (fork,) = clean.fork()
    with fork:
        fork.exec("echo later > later; rm new; git checkout -q gone.txt").check()
        assert written(fork) == ({"later"}, set())  # gone.txt is what it was
        assert b"sealed" not in patch_of(fork)
    assert b"+sealed" in patch_of(clean)


def test_replaced_objects_deceive_no_patch(clean: Sandbox) -> None:
    clean.exec("echo 2 >> a.txt; git add -A; git commit -qm two; git replace HEAD~1 HEAD").check()
    assert b"+2" in patch_of(clean)


def test_whatever_is_done_to_files_both_ways_say_the_same(clean: Sandbox) -> None:
    chance = random.Random(5)
    names = ["a.txt", "gone.txt", "sub", "sub/s.txt", "new", "new/a b", "new/x.log", "é\n;'$(x)", "[a]", "dir/y"]
    before = clean.snapshot()
    for _ in range(12):
        lines = []
        for _ in range(chance.randint(1, 8)):
            one, other = (shlex.quote(name) for name in chance.sample(names, 2))
            lines += [
                chance.choice([
                    f"mkdir -p $(dirname {one}); echo {chance.random()} > {one}", f"rm -rf {one}",
                    f"mv -T {one} {other}", f"cp -a {one} {other}", f"ln -s {other} {one}", f"chmod +x {one}",
                    f"mkdir -p {one}", f"git rm -rq --cached {one}", f"echo x >> {one}", "git commit -qam some",
                    "git checkout -q .",
                ])
            ]  # fmt: skip
        clean.exec("\n".join(lines))
        patch_of(clean)
        clean.reset(before)
