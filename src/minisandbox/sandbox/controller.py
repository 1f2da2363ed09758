"""The controller: the launcher and the records of all sandboxes of one process."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from pathlib import Path
from typing import Protocol

from minisandbox.host import reaper, registry
from minisandbox.sandbox import scratch, uppers
from minisandbox.sandbox.launcher import Launcher
from minisandbox.sandbox.network import Gateway
from minisandbox.store.leases import Holder


class Owned(Protocol):
    """A sandbox of this process."""

    @property
    def id(self) -> str:
        """Its name."""

    def stop(self) -> None:
        """End it."""


class Controller:
    """The launcher of this process and the sandboxes it made.

    Args:
        gateway: the gateway of an earlier controller of this process, whose launcher has exited.

    Attributes:
        pid: of this process; what a fork inherited is not its own.
        launcher: makes the sandboxes.
        gateway: serves those that reach the network by an allow-list.
        layers: the store's layers that they use; they cannot be removed meanwhile.
        turns: held while a sandbox is made: more at once would only take the CPU from each other.
    """

    def __init__(self, gateway: Gateway | None = None) -> None:
        runtime = registry.runtime_directory()
        reaper.reap(runtime)
        scratch.reap()
        self.pid = os.getpid()
        self._records = registry.Records(runtime)
        try:
            self.launcher = Launcher(runtime)
        except BaseException:  # a Ctrl-C too: otherwise they would stay
            self._records.close()
            raise
        self.gateway = gateway or Gateway()
        self.layers = Holder()
        self.turns = threading.BoundedSemaphore(max(4, 2 * len(os.sched_getaffinity(0))))
        self._cores: weakref.WeakSet[Owned] = weakref.WeakSet()

    @property
    def directory(self) -> Path:
        """Where the records and doors of this process's sandboxes lie."""
        return self._records.directory

    def listener(self, name: str) -> socket.socket:
        """Open a listener there; see :func:`minisandbox.host.listeners.listen`."""
        return self._records.listener(name)

    def add(self, core: Owned, record: registry.OwnerRecord) -> None:
        """Record a live sandbox."""
        self._cores.add(core)
        self._records.add(record)

    def remove(self, core: Owned) -> None:
        """Forget a sandbox."""
        self._cores.discard(core)
        self._records.remove(core.id)
        self.gateway.forget(core.id)

    def close(self) -> None:
        """Stop every sandbox of this process, then the launcher."""
        if os.getpid() != self.pid:  # a fork inherited us; the sandboxes are its parent's
            return
        for core in list(self._cores):
            core.stop()
        self.gateway.close()
        self.launcher.close()
        uppers.sweep(all_made=True)
        self._records.close()


class _Current:
    """The one controller of this process: a process needs one zygote, not one per sandbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controller: Controller | None = None

    def get(self) -> Controller:
        with self._lock:
            controller = self._controller
            if controller is None or controller.pid != os.getpid():
                controller = None
            if controller is None or not controller.launcher.alive:
                self._controller = controller = Controller(controller.gateway if controller is not None else None)
                atexit.register(controller.close)
            return controller

    def drop(self) -> None:
        with self._lock:
            controller, self._controller = self._controller, None
        if controller is not None:
            controller.close()
            atexit.unregister(controller.close)


_current = _Current()


def current_controller() -> Controller:
    """Return the controller of this process, started at the first use; a forked child gets its own.

    Raises:
        HostError: the launcher could not be started, or the runtime directory cannot be used.
    """
    return _current.get()


def shut_down() -> None:
    """Stop every sandbox of this process and its launcher now, rather than when the process ends."""
    _current.drop()
