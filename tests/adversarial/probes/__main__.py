"""Run the probes: ``python3 -m probes CANARIES [NAME...]``; CANARIES is a JSON file. A line of JSON for each probe."""

from __future__ import annotations

import json
import os
import sys

from . import everything, ipc
from .core import CANARIES, as_line, carry_out


def main() -> int:
    ipc.remember_descriptors()
    with open(sys.argv[1], encoding="utf-8") as file:
        CANARIES.update(json.load(file))
    CANARIES["runner"] = os.getpid()
    wanted = sys.argv[2:]
    for item in everything.probes():
        if not wanted or item.name in wanted or item.kind in wanted:
            print(as_line(item, carry_out(item)), flush=True)
    return 0


sys.exit(main())
