"""Repair a failed build by hand: open a sandbox before the failed step, and keep the changes as an extra layer.

The store records the extra layer for the image, with the key of the layer below. The next build of the image inserts it
there, and builds the following steps on top of it, unless the layers below have changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.errors import BuildError, StoreError
from minisandbox.images.python.lock import PACKAGES, packages_fact
from minisandbox.images.runner import BuildStep, StepContext, build_limits, build_sandbox, mount_points
from minisandbox.images.scripts import BUILD
from minisandbox.store import FailureRecord, LayerRecord, Made, Store, step_key
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.records import StoreRecord
from minisandbox.store.store import check_name
from minisandbox.types import ImageSpec

_SETTLING = 600.0

if TYPE_CHECKING:
    from minisandbox.images.python.packages import Served
    from minisandbox.sandbox import Sandbox


@dataclass(slots=True)
class Repair:
    """A failed build that a user repairs in a sandbox.

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
            CommandFailed: the script that runs at the end of every step failed.
            StoreError: the layer cannot be published.
        """
        image, parent = self.failure.image, self.failure.layers[-1]
        if not self.failure.own_root:  # container images may lack bash, and keep their mtimes
            from minisandbox.images.steps import step_script  # noqa: PLC0415 - slow to import

            settle = step_script("by_hand", "install_settle", WORKDIR=self.failure.workdir)
            self.box.exec(["bash", "-c", settle], cwd="/", timeout=_SETTLING).check()
        self.box.stop()
        facts = {PACKAGES: packages_fact(self._served.packages.values())} if self._served.packages else {}
        step = {"kind": "by_hand", "image": image, "made": f"{time.time():.6f}"}
        key = step_key(parent, step)
        record, _ = self.store.ensure_layer(
            key, parent=parent, step=step, make=lambda _: Made(self._upper / "tree", facts)
        )
        _write_manual_layers(self.store, image, {**read_manual_layers(self.store, image), parent: key})
        self.store.remove_failure(image)
        return record


@contextmanager
def open_failed(store: Store, image: str) -> Iterator[Repair]:
    """Open a sandbox on top of the layers below the failed step of an image's last build.

    Raises:
        NotFound: the store has no failed build of the image, or lacks one of its layers.
        SandboxCreationError: the sandbox could not be created.
    """
    from minisandbox.images.python.index import find_uv, index_access  # noqa: PLC0415 - slow to import
    from minisandbox.images.python.packages import PackageIndex, Served  # noqa: PLC0415 - slow to import

    failure = store.failure(image)
    trees, workdir = tuple(map(store.layer_tree, failure.layers)), PurePosixPath(failure.workdir)
    spec = ImageSpec(f"{image}: by hand", trees, failure.environment, workdir, host_usr=not failure.own_root)
    served = Served()
    with (
        store.hold(*failure.layers), store.staging("by-hand") as staging, PackageIndex(store) as index,
        index.serve(served) as url,
    ):  # fmt: skip
        upper, access, mounts = staging / "upper", index_access(url), mount_points([(find_uv(), "uv")])
        upper.mkdir(mode=0o755)
        with build_sandbox(spec, build_limits(None), access.network, mounts, upper) as box:
            box.files.mkdir(BUILD)
            yield Repair(store, failure, box, access.environment, upper, served)


# --- layers made by hand ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ManualLayers(StoreRecord):
    layers: Mapping[str, str]


def read_manual_layers(store: Store, image: str) -> Mapping[str, str]:
    """Return the keys of the layers made by hand for an image, by the key of the layer below.

    Raises:
        StoreError: the record is damaged.
    """
    path = _record_path(store, image)
    with store_faults(f"read what was made by hand for {image}"):
        try:
            return _ManualLayers.read(store.root, str(path.relative_to(store.root))).layers
        except FileNotFoundError:
            return {}
        except StoreError as error:
            error.hint = f"`minisandbox image rm {image}` removes it"
            raise


def _write_manual_layers(store: Store, image: str, layers: Mapping[str, str]) -> None:
    """Record the layers made by hand for an image, replacing the earlier record. See :func:`read_manual_layers`."""
    path = _record_path(store, image)
    with store_faults(f"record what was made by hand for {image}"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, _ManualLayers(layers).to_json())


def forget_manual_layers(store: Store, image: str) -> bool:
    """Remove the record of the layers made by hand for an image; return whether there was a record."""
    path = _record_path(store, image)
    with store_faults(f"forget what was made by hand for {image}"):
        exists = path.exists()
        path.unlink(missing_ok=True)
    return exists


def images_by_hand(store: Store) -> list[str]:
    """Return the names of the images that have layers made by hand."""
    return sorted(path.stem for path in (store.root / "by-hand").glob("[!.]*.json"))


def manual_step(image: str, layer: str) -> BuildStep:
    """Return the build step of a layer made by hand. Its layer cannot be built, so it must exist in the store."""

    def make(_: StepContext) -> Made:
        raise BuildError(
            f"layer {layer[:16]}, made by hand for image {image!r}, is no longer in the store",
            step="by_hand",
            hint=f"`minisandbox image rm {image}` forgets it, and the next build does without",
        )

    return BuildStep("by_hand", {"kind": "by_hand", "layer": layer}, make)


def _record_path(store: Store, image: str) -> Path:
    return store.root / "by-hand" / f"{check_name(image)}.json"
