"""How a repository's changes become a patch; git runs inside the sandbox, never on the host (DESIGN 4.5)."""

from __future__ import annotations

from dataclasses import replace

from minisandbox.errors import CommandFailed
from minisandbox.types import ExecResult, Outcome

# A temporary index leaves the agent's own alone; it and the finished patch lie in a directory that the caller names and
# removes: what a timeout ends cannot tidy up.
# Submodules of the base commit are left out: their commits are not ours to carry. Repositories that the agent made or
# cloned inside (git would record a commit of theirs, or fail) come along as the files that they consist of.
PATCH_SCRIPT = r"""
set -e -o pipefail
base=$1 work=$2
mkdir -m 700 -- "$work"
export GIT_INDEX_FILE="$work/index" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
unset GIT_LITERAL_PATHSPECS GIT_DIFF_OPTS GIT_EXTERNAL_DIFF
git() {
    command git -c core.fsmonitor=false -c core.autocrlf=false -c core.fileMode=true -c core.symlinks=true \
        -c core.quotePath=true -c core.attributesFile=/dev/null -c core.hooksPath=/dev/null \
        -c diff.orderFile=/dev/null \
        -c diff.suppressBlankEmpty=false -c diff.indentHeuristic=true -c advice.addEmbeddedRepo=false "$@"
}
git read-tree "$base"

exclude=() nested=()
while IFS= read -r -d '' submodule; do exclude+=(":(exclude,literal)$submodule"); done \
    < <(git ls-files -s -z -- . | sed -zn 's/^160000 [0-9a-f]* [0-9]\t//p')
while IFS= read -r -d '' marker; do
    path=${marker#./} path=${path%/.git}
    if git ls-files -s -- ":(literal)$path" | grep -q ^160000 || git check-ignore -q -- "$path"; then continue; fi
    exclude+=(":(exclude,literal)$path") nested+=("$path")
done < <(find . -mindepth 2 -name .git -prune -print0)

git add -A -- . "${exclude[@]}" >&2
for path in "${nested[@]}"; do
    { git ls-files -z -- ":(literal)$path"; find "$path" -name .git -prune -o \( -type f -o -type l \) -print0; } \
        | git update-index --add --remove -z --stdin >&2
done

git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --no-relative \
    --ignore-submodules=all --unified=3 --inter-hunk-context=0 --diff-algorithm=myers \
    --src-prefix=a/ --dst-prefix=b/ "$base" > "$work/patch"
rm -f "$GIT_INDEX_FILE"
"""


_HELD = (
    "something may hold git for ever, such as a FIFO in place of a file of the repository; changes() asks nothing "
    "inside; a large repository may need a larger timeout"
)


def checked_patch(result: ExecResult, patch: bytes) -> bytes:
    """The patch, if the script that made it succeeded.

    Raises:
        CommandFailed: it did not.
    """
    if not result.ok:
        shown = replace(result, command="git diff")  # what was run is pages long
        raise CommandFailed(shown, hint=_HELD if result.outcome is Outcome.TIMEOUT else None)
    return patch
