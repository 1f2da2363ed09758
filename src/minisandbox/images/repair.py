"""Repair a failed build by hand: open the layers below the failed step, and keep the changes as a further layer.

The store records the layer for the image and the layer below. The next build of the image inserts it there and builds
the following steps on top of it, as long as the layers below do not change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.images.kept import read_kept, write_kept
from minisandbox.images.places import BUILD
from minisandbox.images.python.index import find_uv, index_access
from minisandbox.images.python.lock import PACKAGES, packages_fact
from minisandbox.images.python.packages import PackageIndex, Served
from minisandbox.images.runner import build_limits, build_sandbox, mount_points
from minisandbox.images.steps import step_script
from minisandbox.sandbox import Sandbox
from minisandbox.store import FailureRecord, LayerRecord, Made, Store, step_key
from minisandbox.types import ImageSpec

_SETTLING = 600.0


@dataclass(slots=True)
class Repair:
    """A failed build, open for repair by hand.

    Attributes:
        store: the store of the layers.
        failure: the record of the failure.
        box: a sandbox on top of the layers below the failed step.
        environment: variables for commands, which give them access to the package index.
    """

    store: Store
    failure: FailureRecord
    box: Sandbox
    environment: Mapping[str, str]
    _upper: Path = field(repr=False)
    _served: Served = field(repr=False)

    def keep(self) -> LayerRecord:
        """Stop the sandbox and publish its writes as a layer, which the next build of the image uses.

        Raises:
            CommandFailed: the script that finishes every step failed.
            StoreError: the layer cannot be published.
        """
        image, parent = self.failure.image, self.failure.layers[-1]
        if not self.failure.own_root:  # container images may lack bash, and need no uniform times
            settle = step_script("by_hand", "install_settle", WORKDIR=self.failure.workdir)
            self.box.exec(["bash", "-c", settle], cwd="/", timeout=_SETTLING).check()
        self.box.stop()
        facts = {PACKAGES: packages_fact(self._served.packages.values())} if self._served.packages else {}
        step = {"kind": "by_hand", "image": image, "made": f"{time.time():.6f}"}
        key = step_key(parent, step)
        record, _ = self.store.ensure_layer(
            key, parent=parent, step=step, make=lambda _: Made(self._upper / "tree", facts)
        )
        write_kept(self.store, image, {**read_kept(self.store, image), parent: key})
        self.store.remove_failure(image)
        return record


@contextmanager
def open_failed(store: Store, image: str) -> Iterator[Repair]:
    """Open a sandbox on top of the layers below the failed step of an image's last build.

    Raises:
        NotFound: the store has no failed build of the image, or lacks one of its layers.
        SandboxCreationError: the sandbox could not be created.
    """
    failure = store.failure(image)
    trees, workdir = tuple(map(store.layer_tree, failure.layers)), PurePosixPath(failure.workdir)
    spec = ImageSpec(f"{image}: by hand", trees, failure.environment, workdir, host_usr=not failure.own_root)
    served = Served()
    with ExitStack() as opened:
        opened.enter_context(store.hold(*failure.layers))
        staging = opened.enter_context(store.staging("by-hand"))
        upper = staging / "upper"
        upper.mkdir(mode=0o755)
        index = opened.enter_context(PackageIndex(store))
        access = index_access(opened.enter_context(index.serve(served)))
        mounts = mount_points([(find_uv(), "uv")])
        box = opened.enter_context(build_sandbox(spec, build_limits(None), access.network, mounts, upper))
        box.files.mkdir(BUILD)
        yield Repair(store, failure, box, access.environment, upper, served)
