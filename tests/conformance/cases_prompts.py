"""Pagers, editors and questions: nothing waits for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import case

if TYPE_CHECKING:
    from minisandbox.sandbox import AsyncSandbox

REPOSITORY = """
set -e
git init -q repo; cd repo; git config user.email a@b; git config user.name n
for n in $(seq 120); do echo $n > f; git add f; git -c core.hooksPath=/dev/null commit -qm "commit $n"; done
"""


@case("git's long answers are not paged", deadline=240.0)
async def case_git_pager(box: AsyncSandbox) -> None:
    (await box.exec(REPOSITORY, timeout=60)).check()
    result = await box.exec("git log --oneline | cat; git log; git branch -a; git diff HEAD~50", cwd="repo", timeout=60)
    assert result.ok
    assert result.stdout.count("Author:") == 120
    paged = await box.exec("git -c core.pager=less -p log --format=%s", cwd="repo", timeout=60)
    assert paged.stdout.count("commit ") == 120


@case("git commit, rebase and tag without a message end by themselves")
async def case_git_editor(box: AsyncSandbox) -> None:
    (await box.exec(REPOSITORY.replace("120", "3"))).check()
    empty = await box.exec("echo x > g; git add g; git commit", cwd="repo", timeout=60)
    assert empty.exit_code == 1
    assert (await box.exec("git commit --amend && git rebase -i HEAD~1", cwd="repo", timeout=60)).ok
    assert not (await box.exec("git tag -a v1", cwd="repo", timeout=60)).ok


@case("git never asks for a name or a password")
async def case_git_credentials(box: AsyncSandbox) -> None:
    result = await box.exec(["git", "credential", "fill"], stdin="protocol=https\nhost=x.invalid\n\n", timeout=60)
    assert not result.ok
    assert "terminal prompts disabled" in result.stderr


@case("pagers print and end")
async def case_pagers(box: AsyncSandbox) -> None:
    await box.exec("seq 500 > long")
    for pager in ("less", "more", "man"):
        if (await box.exec(["which", pager])).ok:
            what = "man" if pager == "man" else "long"
            result = await box.exec([pager, what], timeout=60)
            assert result.outcome.value == "exited", pager
            assert pager == "man" or result.stdout.endswith("499\n500\n")
    assert (await box.exec("${PAGER:-less} long | tail -n 1", timeout=60)).stdout == "500\n"


@case("Python's help is not paged")
async def case_python_help(box: AsyncSandbox) -> None:
    result = await box.exec(["python3", "-c", "help(dict)"], timeout=60)
    assert result.ok
    assert "class dict" in result.stdout


@case("a password prompt on /dev/tty fails rather than waits")
async def case_password(box: AsyncSandbox) -> None:
    program = "import getpass, warnings; warnings.simplefilter('ignore'); getpass.getpass('Password: ')"
    result = await box.exec(["python3", "-c", program], timeout=60)
    assert "EOFError" in result.stderr
    assert (await box.exec("read -s -p Password: x < /dev/tty; echo $?", timeout=60)).stdout == "1\n"
    assert not (await box.exec("exec 3<> /dev/tty", timeout=60)).ok


@case("read, select, input and a debugger end at the end of stdin")
async def case_questions(box: AsyncSandbox) -> None:
    assert (await box.exec("read -p 'Sure? ' answer; echo $?", timeout=60)).stdout == "1\n"
    assert (await box.exec("select x in a b; do echo $x; done; echo end", timeout=60)).stdout.endswith("end\n")
    assert "EOFError" in (await box.exec(["python3", "-c", "input('? ')"], timeout=60)).stderr
    debugger = await box.exec(["python3", "-c", "breakpoint(); print('on')"], timeout=60)
    assert debugger.outcome.value == "exited"


@case("interpreters without a script end at once")
async def case_interpreters(box: AsyncSandbox) -> None:
    for interpreter in (["python3"], ["bash"], ["sh"], ["bash", "-i"]):
        assert (await box.exec(interpreter, timeout=60)).outcome.value == "exited", interpreter


@case("an editor that is asked for ends without a change")
async def case_editor(box: AsyncSandbox) -> None:
    await box.exec("echo text > file")
    assert (await box.exec("$EDITOR file && $VISUAL file && cat file", timeout=60)).stdout == "text\n"


@case("cp, mv and rm with questions take the end of stdin for no")
async def case_confirmations(box: AsyncSandbox) -> None:
    await box.exec("echo 1 > a; echo 2 > b")
    await box.exec("cp -i a b; rm -i a; mv -i a b", timeout=60)
    assert (await box.exec("cat a b")).stdout == "1\n2\n"
