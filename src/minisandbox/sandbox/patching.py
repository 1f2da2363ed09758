"""How a repository's changes become a patch; git runs inside the sandbox, never on the host (DESIGN 4.5)."""

from __future__ import annotations

from minisandbox.errors import CommandFailed
from minisandbox.types import ExecResult

# A temporary index leaves the agent's own alone; the path of the finished patch is what the script prints.
PATCH_SCRIPT = """
set -e
work=$(mktemp -d /tmp/patch.XXXXXX)
export GIT_INDEX_FILE="$work/index" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
git read-tree "$1"
git -c core.fsmonitor=false -c core.autocrlf=false -c advice.addEmbeddedRepo=false add -A . >&2
git -c core.quotePath=true -c diff.noprefix=false -c diff.mnemonicPrefix=false -c core.attributesFile=/dev/null \
    diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames \
    --src-prefix=a/ --dst-prefix=b/ "$1" > "$work/patch"
rm -f "$GIT_INDEX_FILE"
printf '%s\\n' "$work/patch"
"""


def checked_patch(result: ExecResult, patch: bytes) -> bytes:
    """The patch, if the script that made it succeeded.

    Raises:
        CommandFailed: it did not.
    """
    if not result.ok:
        raise CommandFailed(result)
    return patch
