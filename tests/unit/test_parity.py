"""The synchronous handles are those that the asynchronous ones derive, and the docstrings of both tell all."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
from tools import make_sync

from minisandbox.sandbox import AsyncFiles, AsyncProcess, AsyncSandbox, AsyncShell, Files, Process, Sandbox, Shell

TWINS = [(Sandbox, AsyncSandbox), (Process, AsyncProcess), (Shell, AsyncShell), (Files, AsyncFiles)]
PROTOCOL = {"__enter__": "__aenter__", "__exit__": "__aexit__"}
# plain on both sides: it begins what is waited for elsewhere
NEVER_WAIT = {"events"}


def verbs(handle: type) -> dict[str, object]:
    """Public members as they were written, and the context manager's."""
    return {
        name: member
        for name, member in vars(handle).items()
        if not name.startswith("_") or name in {*PROTOCOL, *PROTOCOL.values()}
    }


def function_of(member: object) -> object:
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


PAIRS = [
    pytest.param(first, second, name, id=f"{first.__name__}.{name}") for first, second in TWINS for name in verbs(first)
]


def test_the_synchronous_modules_are_current() -> None:
    stale = [path.name for path, text in make_sync.modules().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run 'PYTHONPATH=src python tools/make_sync.py'"
    made = {*make_sync.modules(), make_sync.SANDBOX / "_sync" / "__init__.py"}
    assert {*(make_sync.SANDBOX / "_sync").glob("*.py")} == made


def test_keywords_names_and_phrases_are_derived() -> None:
    source = '''class AsyncShell:
    """Use an ``async with`` block of :class:`.AsyncShell`; a cancellation ends it."""

    async def __aenter__(self) -> AsyncIterator[int]:
        return await one(await other()), "await is a word"
'''
    assert (
        make_sync.derive(source)
        == '''class Shell:
    """Use a ``with`` block of :class:`.Shell`; Ctrl-C ends it."""

    def __enter__(self) -> Iterator[int]:
        return one(other()), "await is a word"
'''
    )


def test_the_synchronous_handles_need_no_event_loop() -> None:
    program = "import sys, minisandbox; minisandbox.Sandbox.create; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_kind(first: type, second: type, name: str) -> None:
    one, other = verbs(first)[name], verbs(second)[PROTOCOL.get(name, name)]
    assert type(one) is type(other)
    waits = not isinstance(one, property) and name not in NEVER_WAIT
    assert inspect.iscoroutinefunction(function_of(other)) is waits
    assert not inspect.iscoroutinefunction(function_of(one))


@pytest.mark.parametrize(("first", "second"), TWINS)
def test_no_docstring_has_words_of_the_other_colour(first: type, second: type) -> None:
    texts = [inspect.getdoc(first) or "", *(inspect.getdoc(member) or "" for member in verbs(first).values())]
    assert not re.search(r"async|event loop|cancel|task", "\n".join(texts), re.IGNORECASE)
    others = [inspect.getdoc(second) or "", *(inspect.getdoc(member) or "" for member in verbs(second).values())]
    assert not re.search(r"Ctrl-C|thread", "\n".join(others))


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_the_docstring_tells_all(first: type, second: type, name: str) -> None:
    for member in (verbs(first)[name], verbs(second)[PROTOCOL.get(name, name)]):
        text = inspect.getdoc(member) or ""
        function = function_of(member)
        assert callable(function)
        arguments = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        if isinstance(member, property) or name in PROTOCOL or "Raises as :meth:" in text:
            return
        for argument in arguments:
            assert re.search(rf"^    {argument}: ", text, re.MULTILINE) or len(arguments) == 1, argument
        if inspect.signature(function).return_annotation != "None":
            assert "Returns:" in text or text.startswith(("Return whether", "Return the names of")), name
