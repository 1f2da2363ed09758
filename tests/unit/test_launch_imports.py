"""Nothing can be imported once sandboxes are being made: the files would be those of the sandbox."""

from __future__ import annotations

import subprocess
import sys


def test_no_import_works_any_more() -> None:
    script = (
        "from minisandbox.launch import zygote; zygote.forbid_imports()\n"
        "open('/dev/null', encoding='ascii').close()\n"
        "try: import colorsys\n"
        "except ImportError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
