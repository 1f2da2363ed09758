"""Build, pull, export and list images. An image is a stack of layers that sandboxes start from.

Public names are imported on first use, because starting a sandbox needs few of the modules that build images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisandbox.lazy import importer

_NAMES = {
    "builder": "build read_dockerfile",
    "dockerfile.evaluation": "BuildOptions",
    "image": "Image ImageSize host_image image_sizes list_images load_image total_size",
    "oci.export": "export_images",
    "oci.prefetch": "Pulled pull_all",
    "oci.pull": "import_images pull",
    "oci.push": "push push_set",
    "oci.sets": "SetIndex fetch_files pull_set read_set",
    "progress": "BuildEvent Progress StepState",
    "python.installed": "PythonEnvironment python_environments",
    "python.interpreters": "Interpreter find_interpreter installed_interpreters",
    "python.lock": "lock_of read_lock",
    "schedule": "Budget Building Built build_all",
}
"""The public names of each module, separated by spaces."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_HOME |= dict.fromkeys(("Pins", "read_pins"), ".spec")

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above is the one definition

if TYPE_CHECKING:
    from minisandbox.images.builder import build as build
    from minisandbox.images.builder import read_dockerfile as read_dockerfile
    from minisandbox.images.dockerfile.evaluation import BuildOptions as BuildOptions
    from minisandbox.images.image import Image as Image
    from minisandbox.images.image import host_image as host_image
    from minisandbox.images.image import image_sizes as image_sizes
    from minisandbox.images.image import list_images as list_images
    from minisandbox.images.image import load_image as load_image
    from minisandbox.images.image import total_size as total_size
    from minisandbox.images.oci.export import export_images as export_images
    from minisandbox.images.oci.prefetch import Pulled as Pulled
    from minisandbox.images.oci.prefetch import pull_all as pull_all
    from minisandbox.images.oci.pull import import_images as import_images
    from minisandbox.images.oci.pull import pull as pull
    from minisandbox.images.oci.push import push as push
    from minisandbox.images.oci.push import push_set as push_set
    from minisandbox.images.oci.sets import SetIndex as SetIndex
    from minisandbox.images.oci.sets import fetch_files as fetch_files
    from minisandbox.images.oci.sets import pull_set as pull_set
    from minisandbox.images.oci.sets import read_set as read_set
    from minisandbox.images.progress import BuildEvent as BuildEvent
    from minisandbox.images.progress import Progress as Progress
    from minisandbox.images.progress import StepState as StepState
    from minisandbox.images.python.installed import PythonEnvironment as PythonEnvironment
    from minisandbox.images.python.installed import python_environments as python_environments
    from minisandbox.images.python.interpreters import Interpreter as Interpreter
    from minisandbox.images.python.interpreters import find_interpreter as find_interpreter
    from minisandbox.images.python.interpreters import installed_interpreters as installed_interpreters
    from minisandbox.images.python.lock import lock_of as lock_of
    from minisandbox.images.python.lock import read_lock as read_lock
    from minisandbox.images.schedule import Budget as Budget
    from minisandbox.images.schedule import Building as Building
    from minisandbox.images.schedule import Built as Built
    from minisandbox.images.schedule import build_all as build_all
    from minisandbox.spec import Pins as Pins
    from minisandbox.spec import read_pins as read_pins
    from minisandbox.store.sizes import ImageSize as ImageSize

__getattr__ = importer(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
