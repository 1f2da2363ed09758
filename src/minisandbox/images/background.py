"""Many images made together in the background, each handed over as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from minisandbox.images.estimate import Estimate
from minisandbox.images.image import Image
from minisandbox.images.progress import Progress
from minisandbox.images.recipe import Buildable
from minisandbox.images.schedule import Budget, Built, build_all
from minisandbox.sandbox.cancellation import Cancellation, CancelledError
from minisandbox.store import Store

_ENDING = 30.0


class Building:
    """What :func:`build_all` does, in a thread of its own that keeps no process alive. Begins when it is made.

    Arguments are those of :func:`build_all`, and the backend of the images' sandboxes.

    Attributes:
        images: by name, the image as soon as it is there; or why it failed, once all others are made. Where the
            building was called off, that is a :class:`.CancelledError`.
    """

    def __init__(
        self,
        recipes: Mapping[str, Callable[[], Buildable]],
        *,
        store: Store,
        budget: Budget | None = None,
        progress: Progress | None = None,
        on_estimate: Callable[[Estimate], None] | None = None,
        mirrors: Path | None = None,
        backend: str = "",
    ) -> None:
        self.images: dict[str, Future[Image]] = {name: Future() for name in recipes}
        for future in self.images.values():
            future.set_running_or_notify_cancel()  # who no longer waits for one does not end it for the others
        self._cancellation = Cancellation()

        def make() -> Built:
            return build_all(
                recipes, store=store, budget=budget, progress=progress, on_estimate=on_estimate,
                on_image=lambda image: self.images[image.name].set_result(replace(image, backend=backend)),
                mirrors=mirrors,
                cancellation=self._cancellation,
            )  # fmt: skip

        self._thread = threading.Thread(target=self._work, args=(make,), name="building", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Call it off and wait until what runs has ended. Finished layers are kept. Calling it again does nothing."""
        self._cancellation.cancel()
        self._thread.join(_ENDING)

    def _work(self, make: Callable[[], Built]) -> None:
        try:
            failures: Mapping[str, BaseException] = make().failures
        except BaseException as error:  # noqa: BLE001 - raised where an image is waited for
            failures = dict.fromkeys(self.images, error)
        for name, future in self.images.items():
            if not future.done():
                future.set_exception(failures.get(name) or CancelledError())
