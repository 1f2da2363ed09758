"""The controller of one process: its launcher, and the records of all its sandboxes."""

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
    """A sandbox that this process owns."""

    @property
    def id(self) -> str:
        """Id of the sandbox."""

    def stop(self) -> None:
        """Stop the sandbox."""


class Controller:
    """The launcher of this process, and the sandboxes that it created.

    Args:
        gateway: the gateway of an earlier controller of this process, whose launcher has exited.

    Attributes:
        pid: pid of this process, to recognise a controller that a forked child has inherited.
        launcher: creates the sandboxes.
        gateway: provides network access for sandboxes with an allow-list.
        layers: leases of the store's layers that the sandboxes use, which keep the layers from being removed.
        turns: semaphore held while a sandbox is created; many creations at once would only compete for the CPU.
    """

    def __init__(self, gateway: Gateway | None = None) -> None:
        runtime = registry.runtime_directory()
        reaper.reap(runtime)
        scratch.reap()
        self.pid = os.getpid()
        self._records = registry.Records(runtime)
        try:
            self.launcher = Launcher(runtime)
        except BaseException:  # even on Ctrl-C, remove the records
            self._records.close()
            raise
        self.gateway = gateway or Gateway()
        self.layers = Holder()
        self.turns = threading.BoundedSemaphore(max(4, 2 * len(os.sched_getaffinity(0))))
        self._cores: weakref.WeakSet[Owned] = weakref.WeakSet()

    @property
    def directory(self) -> Path:
        """Directory of the records and listening sockets of this process's sandboxes."""
        return self._records.directory

    def listener(self, name: str) -> socket.socket:
        """Open a listening socket in :attr:`directory`; see :func:`minisandbox.host.listeners.listen`."""
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
        if os.getpid() != self.pid:  # in a forked child: the sandboxes belong to its parent
            return
        for core in list(self._cores):
            core.stop()
        self.gateway.close()
        self.launcher.close()
        uppers.sweep(include_live=True)
        self._records.close()


class _Current:
    """Holds the controller of this process, so that all its sandboxes share one zygote."""

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
    """Return the controller of this process. It is started at its first use; a forked child gets a new one.

    Raises:
        HostError: the launcher could not be started, or the runtime directory cannot be used.
    """
    return _current.get()


def shut_down() -> None:
    """Stop every sandbox of this process and its launcher now, instead of at exit."""
    _current.drop()
