"""One engine's process: opens it, measures what its standard input asks for, removes everything at the end of input.

    python -m benchmarks.engines.worker ENGINE PLACE GROUP PROJECT...

Requests and replies are lines of JSON. It runs in a session of its own, so that Ctrl-C reaches only its parent.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks.engines.engine import SUITE, Engine, Output, Project
from benchmarks.engines.registry import engine_class

Sample = dict[str, Any]
_SUMMARY = re.compile(r"(\d+ (?:passed|failed).*) in [\d.]+s")


def main() -> None:
    """Serve requests."""
    name, place, group, *projects = sys.argv[1:]
    engine = engine_class(name)(Path(place), group, [Project(Path(project)) for project in projects])
    measured = Measured(engine)
    try:
        reply(lambda: {"version": engine.open(), **measured.creation(count=1)})  # the first one proves that it works
        for line in sys.stdin:
            request = json.loads(line)
            reply(lambda: getattr(measured, request.pop("measure"))(**request))  # noqa: B023 - called at once
    finally:
        with contextlib.suppress(RuntimeError):
            measured.release()
        engine.close()


def reply(action: Callable[[], Sample]) -> None:
    """Write a sample as one line, or why there is none."""
    try:
        sample = action()
    except Exception as error:  # noqa: BLE001 - recorded as the result
        sample = {"failed": " ".join(str(error).split())[:500] or type(error).__name__}
    print(json.dumps(sample), flush=True)


class Measured:
    """Measurements of an engine; every method returns a sample, times in seconds.

    Args:
        engine: it, opened before the first measurement.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: list[Any] = []

    def creation(self, count: int) -> Sample:
        """Create, run /bin/true and stop, one after the other."""
        ready, teardown = [], []
        for number in range(count):
            start = time.perf_counter()
            box = self._first(number)
            ready.append(time.perf_counter() - start)
            teardown.append(timed(lambda: self._engine.stop(box)))  # noqa: B023 - called at once
        return {"ready": ready, "teardown": teardown}

    def exec(self, count: int) -> Sample:
        """Run /bin/true and a shell command in a running sandbox, in alternation."""
        box = self._first(0)
        true, shell = [], []
        try:
            for _ in range(count):
                true.append(timed(lambda: check(self._engine.exec(box, ["/bin/true"]))))
                shell.append(timed(lambda: check(self._engine.shell(box, "echo $((40 + 2))"), "42")))
        finally:
            self._engine.stop(box)
        return {"true": true, "shell": shell}

    def hold(self, count: int) -> Sample:
        """Create sandboxes at once, and wait until each has run a command; they live until :meth:`release`."""

        def make(number: int) -> None:
            self._live.append(self._first(number))

        try:
            return {"ready": timed(lambda: in_threads(make, range(count)))}
        except RuntimeError:
            self.release()
            raise

    def release(self) -> Sample:
        """Stop at once the sandboxes that :meth:`hold` made."""
        boxes, self._live = self._live, []
        return {"teardown": timed(lambda: in_threads(self._engine.stop, boxes))}

    def rollout(self, commands: int) -> Sample:
        """Create, run shell commands that append to a file, see that all did, stop."""
        start = time.perf_counter()
        box = self._engine.create(self._engine.projects[0])
        try:
            for number in range(commands - 1):
                check(self._engine.shell(box, f"echo {number} >> /tmp/notes"))
            check(self._engine.shell(box, "wc -l < /tmp/notes"), str(commands - 1))
        finally:
            self._engine.stop(box)
        return {"wall": time.perf_counter() - start}

    def validation(self, project: str) -> Sample:
        """Create, run the project's tests, stop."""
        start = time.perf_counter()
        box = self._engine.create(next(one for one in self._engine.projects if one.home.name == project))
        begun = time.perf_counter()
        try:
            output = self._engine.exec(box, SUITE)
        finally:
            suite = time.perf_counter() - begun
            self._engine.stop(box)
        summary = _SUMMARY.search(output.text)
        if output.status != 0 or summary is None:
            raise RuntimeError(f"the tests end with {output.status}: {output.text[-300:]}")
        # where creation is not measured, as on the bare host, only the tests count
        wall = time.perf_counter() - start if "creation" in self._engine.measures else None
        return {"wall": wall, "suite": suite, "tests": summary[1]}

    def _first(self, number: int) -> Any:
        box = self._engine.create(self._engine.projects[number % len(self._engine.projects)])
        try:
            check(self._engine.exec(box, ["/bin/true"]))
        except RuntimeError:
            self._engine.stop(box)
            raise
        return box


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def check(output: Output, text: str = "") -> None:
    """Raise RuntimeError unless a command succeeded and printed this."""
    if output.status != 0 or output.text.strip() != text:
        raise RuntimeError(f"a command ended with {output.status} and printed {output.text[-300:]!r}, not {text!r}")


def in_threads(action: Callable[[Any], object], values: Collection[Any]) -> None:
    """Call a function with every value, each in a thread of its own.

    Raises:
        RuntimeError: some of the calls failed.
    """
    errors: list[Exception] = []

    def call(value: Any) -> None:
        try:
            action(value)
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=call, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(values)} failed, one with {errors[0]}") from errors[0]


if __name__ == "__main__":
    main()
