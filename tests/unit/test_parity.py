"""Sync and async handles have the same names, the same arguments and the same results."""

from __future__ import annotations

import inspect
import re

import pytest

from minisandbox.sandbox import (
    AsyncFiles,
    AsyncProcess,
    AsyncSandbox,
    AsyncShell,
    Files,
    Process,
    Sandbox,
    Shell,
)

TWINS = [(Sandbox, AsyncSandbox), (Process, AsyncProcess), (Shell, AsyncShell), (Files, AsyncFiles)]
PROTOCOL = {"__enter__": "__aenter__", "__exit__": "__aexit__"}
# plain on both sides: they only look, or begin something that is waited for elsewhere
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


def twin_of(second: type, name: str) -> object:
    return verbs(second)[PROTOCOL.get(name, name)]


@pytest.mark.parametrize(("first", "second"), TWINS)
def test_names(first: type, second: type) -> None:
    assert {PROTOCOL.get(name, name) for name in verbs(first)} == set(verbs(second))


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_kind(first: type, second: type, name: str) -> None:
    one, other = verbs(first)[name], twin_of(second, name)
    assert type(one) is type(other)
    waits = not isinstance(one, property) and name not in NEVER_WAIT
    assert inspect.iscoroutinefunction(function_of(other)) is waits
    assert not inspect.iscoroutinefunction(function_of(one))


def plain(annotation: str) -> str:
    """An annotation without what makes it asynchronous."""
    return re.sub(r"\bAsync(?=[A-Z])", "", annotation)


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_signature(first: type, second: type, name: str) -> None:
    one, other = (function_of(member) for member in (verbs(first)[name], twin_of(second, name)))
    assert callable(one)
    assert callable(other)
    ours, theirs = inspect.signature(one), inspect.signature(other)
    shape = [(p.name, p.kind, p.default, p.annotation) for p in ours.parameters.values()]
    assert [(p.name, p.kind, p.default, plain(str(p.annotation))) for p in theirs.parameters.values()] == [
        (n, k, d, str(a)) for n, k, d, a in shape
    ]
    assert plain(str(theirs.return_annotation)) == str(ours.return_annotation)


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_the_asynchronous_docstring_points_at_its_twin(first: type, second: type, name: str) -> None:
    text = inspect.getdoc(twin_of(second, name)) or ""
    role = "attr" if isinstance(verbs(first)[name], property) else "meth"
    assert re.match(rf"As :{role}:`\.{first.__name__}\.{name}`[.,]", text), text


@pytest.mark.parametrize(("first", "second"), TWINS)
def test_the_class_points_at_its_twin(first: type, second: type) -> None:
    assert (second.__doc__ or "").startswith(f"As :class:`.{first.__name__}`")


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_the_synchronous_docstring_tells_all(first: type, second: type, name: str) -> None:
    member = verbs(first)[name]
    text = inspect.getdoc(member) or ""
    function = function_of(member)
    assert callable(function)
    arguments = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    if isinstance(member, property) or name in PROTOCOL or "Raises as :meth:" in text:
        return
    for argument in arguments:
        assert re.search(rf"^    {argument}: ", text, re.MULTILINE) or len(arguments) == 1, argument
    if not text.startswith("Whether") and inspect.signature(function).return_annotation != "None":
        assert "Returns:" in text or text.split("\n", 1)[0].startswith(("Names of",)), name
