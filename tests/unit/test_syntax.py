"""Parsing of Python source."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import time
from pathlib import Path

import pytest

from minisandbox import syntax
from minisandbox.syntax import parse_python

SOURCE = Path(syntax.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("source", ["x = (", "\0", "print 'x'", "(" * 1000 + ")" * 1000])
def test_what_cannot_be_parsed_has_no_tree(source: str) -> None:
    assert parse_python(source) is None


def test_a_failure_by_another_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(source: str) -> ast.Module:
        calls.append(source)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=18, after=12)")
        return compile(source, "x", "exec", ast.PyCF_ONLY_AST)  # type: ignore[return-value]

    monkeypatch.setattr(ast, "parse", failing)
    assert parse_python("x = 1") is not None
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython 3.12 counts the depth of each thread's tree")
def test_threads_parse_at_once() -> None:
    def pause(*_: object) -> None:  # another thread goes on in the middle of a tree
        time.sleep(0.0005)

    def parse() -> None:
        end = time.monotonic() + 4
        while time.monotonic() < end:
            trees.append(parse_python(SOURCE) is not None)

    trees: list[bool] = []
    threshold = gc.get_threshold()
    gc.callbacks.append(pause)
    gc.set_threshold(200)
    try:
        threads = [threading.Thread(target=parse) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(pause)
    assert trees
    assert all(trees)
