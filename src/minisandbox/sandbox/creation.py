"""What a sandbox is made of, refused before anything is made where it cannot be: for real ones and for fakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.sandbox.arguments import check_texts, check_type
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import ImageSpec, Limits, Mount, Network


def check_creation(
    image: object,
    limits: Limits | None,
    network: Network | None,
    mounts: Sequence[Mount],
    environment: Mapping[str, str] | None,
    upper: Path | None,
    labels: Mapping[str, str] | None,
) -> None:
    """Refuse arguments of :meth:`minisandbox.Sandbox.create` that are of a wrong type.

    Raises:
        InvalidValue: one is.
    """
    check_type("image", image, (ImageSpec, Snapshot), "an ImageSpec (Image.spec() gives one) or a Snapshot")
    for name, value, kind, wanted in (
        ("limits", limits, Limits, "a Limits, or None for its defaults"),
        ("network", network, Network, "Network.off(), Network.allow(...) or Network.host()"),
        ("upper", upper, Path, "a Path, or None to write to memory"),
    ):
        if value is not None:
            check_type(name, value, kind, wanted)
    check_texts("environment", environment)
    check_texts("labels", labels)
    if "" in (labels or {}):
        raise InvalidValue("a label has an empty name", hint="labels are texts by non-empty names")
    check_type("mounts", mounts, (list, tuple), "a list of Mount")
    for number, mount in enumerate(mounts):
        check_type(f"mounts[{number}]", mount, Mount, "a Mount(source, target)")
