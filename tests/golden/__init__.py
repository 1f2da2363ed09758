"""Golden data: texts that change only on purpose. ``python tests/golden/update.py`` writes them anew."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parent
UPDATE = "MINISANDBOX_UPDATE_GOLDEN"


def check_golden(name: str, text: str, folder: Path = GOLDEN) -> None:
    """Compare a text with golden data; with ``MINISANDBOX_UPDATE_GOLDEN`` set, write it instead.

    Args:
        name: the file.
        text: what the code yields now.
        folder: the directory of the file.
    """
    path = folder / name
    if os.environ.get(UPDATE):
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden {name}", "now", lineterm="", n=2
        )
        raise AssertionError(
            "\n".join(lines) + f"\n\n{path} differs. If users may notice the change and it is wanted, run "
            "`python tests/golden/update.py`, read the diff of the golden data, and commit it with its reason."
        )
