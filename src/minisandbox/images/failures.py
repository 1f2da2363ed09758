"""Failed builds, kept so that they can be listed, looked into and left alone until somebody asks for another try."""

from __future__ import annotations

import time
from dataclasses import dataclass

from minisandbox.errors import BuildError, MiniSandboxError, NotFound, PatchError
from minisandbox.images.plan import Plan
from minisandbox.images.runner import PlannedStep
from minisandbox.store import FailureRecord, Store


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed builds of a store: one for each image's name.

    Attributes:
        store: the store.
    """

    store: Store

    def add(self, plan: Plan, planned: PlannedStep, error: MiniSandboxError) -> None:
        """Keep that a step of an image failed, unless a full disk or an index that is down is to blame."""
        if not isinstance(error, BuildError | PatchError):
            return
        reason = "\n".join(filter(None, (error.what, error.reason)))
        record = FailureRecord(
            plan.name, planned.step.name, planned.key, planned.below or plan.ground.layers, planned.environment,
            str(planned.workdir), time.time(), reason, own_root=planned.own_root,
        )  # fmt: skip
        self.store.put_failure(record)

    def of_image(self, image: str) -> FailureRecord:
        """Return why the last build of an image failed.

        Raises:
            NotFound: it did not.
        """
        try:
            return self.store.failure(image)
        except NotFound as error:
            error.hint = (
                "`minisandbox image build` keeps one where a step fails; the image itself opens with "
                "`minisandbox sandbox shell --image`"
            )
            raise

    def remove(self, image: str) -> None:
        """Forget the failure of an image; nothing happens if it did not fail."""
        self.store.remove_failure(image)

    def by_step(self) -> dict[str, FailureRecord]:
        """Return the failures by the key of the layer that was not made."""
        return {record.key: record for record in self.store.failures()}


def known_failure(record: FailureRecord, store: Store) -> BuildError:
    """Return the error for a step that failed before and is not tried again."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    log = store.log_path(record.key)
    return BuildError(
        f"build step {record.step!r} of image {record.image!r} failed on {when}, and was not tried again",
        step=record.step,
        log=log,
        reason=record.reason,
        hint=f"--retry-failed tries it again; its log is {log}",
    )
