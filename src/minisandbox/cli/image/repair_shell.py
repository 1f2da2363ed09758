"""Open a shell in a failed build, for ``minisandbox image build --shell``."""

from __future__ import annotations

import os

from minisandbox.cli.common.output import say
from minisandbox.cli.common.streams import follow, has_terminal, window
from minisandbox.images import repair
from minisandbox.store import Store


def repair_by_hand(store: Store, image: str) -> bool:
    """Open a shell on the layers below a failed step, and keep its changes if its exit status is 0.

    Args:
        store: the image's store.
        image: the name of the image whose build failed.

    Returns:
        Whether the changes became a layer, which the next build of the image uses.

    Raises:
        NotFound: the store has no record of a failed build of the image.
        SandboxCreationError: the sandbox could not be created.
    """
    terminal = has_terminal()
    with repair.open_failed(store, image) as work:
        failure = work.failure
        if terminal:
            say(
                f"minisandbox: at step {failure.step!r} of {image}, which failed: {failure.reason.splitlines()[0]}",
                f"the step's log: {store.log_path(failure.key)}",
                "exit 0 keeps the changes and continues the build; any other status drops them",
            )
        env = {**work.environment, "TERM": os.environ.get("TERM", "xterm")}
        command = ["/bin/sh" if failure.own_root else "bash"]
        pty = window() if terminal else None
        with work.box.start(command, cwd=failure.workdir, env=env, pty=pty) as process:
            status = follow(process, stdin=True, terminal=terminal)
        if status:
            say(f"minisandbox: the shell ended with status {status}: its changes were dropped")
            return False
        say(f"minisandbox: kept as layer {work.keep().key[:16]}")
    return True
