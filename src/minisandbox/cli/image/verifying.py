"""``minisandbox image verify``: find damaged layers, and move them to quarantine."""

from __future__ import annotations

import argparse

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, print_json, put
from minisandbox.cli.image.listing import add_set_options, named
from minisandbox.store import Store
from minisandbox.store.sizes import stack_of
from minisandbox.store.verify import VerifyEvent, VerifyReport, verify
from minisandbox.values import human_size


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``verify``."""
    parser.description = (
        "Compare layers with their published records. Damaged ones are quarantined; a build or pull replaces them."
    )
    add_set_options(parser)
    parser.add_argument("--full", action="store_true", help="read every file, not only names, sizes and modes")
    add_json_option(parser)
    parser.set_defaults(run=run_verify, kept="the damaged layers found so far are quarantined")


def run_verify(args: argparse.Namespace) -> int:
    """Verify layers."""
    store = Store.open()
    keys = None
    if args.images or args.tasks is not None:
        images = [store.image(name) for name in named(store, args)]
        all_keys = dict.fromkeys(key for image in images for key in stack_of(image))
        keys = [key for key in all_keys if store.has_layer(key)]
    with Progress() as progress:

        def show(event: VerifyEvent) -> None:
            progress.status(f"{event.done} of {event.total} layers")

        report = verify(store, full=args.full, keys=keys, progress=show)
    if args.json:
        print_json(report)
    else:
        _print_report(report, store)
    return exits.NEGATIVE if report.damaged or report.images else exits.OK


def _print_report(report: VerifyReport, store: Store) -> None:
    bytes_read = f", {human_size(report.bytes)} read" if report.bytes else ""
    put(f"{report.checked} layers, {report.files} files{bytes_read}: {len(report.damaged)} layers damaged")
    for damage in report.damaged:
        path = damage.quarantined
        outcome = f"now in {path}" if path else "not quarantined: the store is read-only"
        put(f"\nlayer {damage.key[:16]} ({damage.kind}): {damage.count} problems; {outcome}")
        for problem in damage.problems:
            put(f"  {problem}")
    if report.unreadable:
        put(f"{report.unreadable} files are not readable for this user: their content was not verified")
    if report.images:
        put(f"\nbroken images: {', '.join(report.images)}\nrebuild them with: minisandbox image build TASKS")
    elif not report.damaged:
        put(f"{store.root} is undamaged")
