"""Create a git patch of a repository's changes; git runs inside the sandbox, never on the host."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from minisandbox.errors import CommandFailed, FileAccessError, InvalidValue, MiniSandboxError
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.protocol import file_operations
from minisandbox.sandbox.protocol.commands import directory, run
from minisandbox.sandbox.protocol.wire import Operation
from minisandbox.sandbox.validation import check_path, check_timeout
from minisandbox.types import Change, ChangeKind, ExecResult, FileType, Outcome

# The script uses a temporary index, so that the agent's index does not change. The index and the patch lie in a
# directory that the caller names and removes, because a script killed by a timeout cannot clean up.
# A checked-out submodule is added as files and compared with the commit that the base names, because a patch cannot
# carry commits of a submodule. Other submodules are left out. A repository that the agent created or cloned inside is
# added as files too; otherwise git would record its commit or fail.
_BEGIN = r"""
set -e -o pipefail
base=$1 work=$2
mkdir -m 700 -- "$work"
export GIT_INDEX_FILE="$work/index" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
export GIT_NO_REPLACE_OBJECTS=1
unset GIT_LITERAL_PATHSPECS GIT_DIFF_OPTS GIT_EXTERNAL_DIFF
git() {
    command git -c core.fsmonitor=false -c core.autocrlf=false -c core.fileMode=true -c core.symlinks=true \
        -c core.quotePath=true -c core.attributesFile=/dev/null -c core.hooksPath=/dev/null \
        -c diff.orderFile=/dev/null \
        -c diff.suppressBlankEmpty=false -c diff.indentHeuristic=true -c advice.addEmbeddedRepo=false "$@"
}
git read-tree "$base"
"""
_WHOLE = r"""exclude=() nested=()
declare -A submodules=()
merge_submodules() {
    local entry path commit objects more=''
    while IFS= read -r -d '' entry; do
        path=${entry#*$'\t'} commit=${entry#160000 } commit=${commit%% *}
        [ -z "${submodules[$path]:-}" ] || continue
        submodules[$path]=left exclude+=(":(exclude,literal)$path")
        [ -e "$path/.git" ] && git -C "$path" cat-file -e "$commit^{tree}" 2> /dev/null || continue
        objects=$(cd -- "$path" && cd -- "$(git rev-parse --git-path objects)" && pwd -P)
        export GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects:${GIT_ALTERNATE_OBJECT_DIRECTORIES:-}"
        printf '%s\0' "$path" | git update-index --force-remove -z --stdin
        git read-tree --prefix="$(git rev-parse --show-prefix)$path/" "$commit"
        submodules[$path]=merged more=1
    done < <(git ls-files -s -z -- . | sed -zn '/^160000 /p')
    [ -z "$more" ] || merge_submodules  # they may have some of their own
}
merge_submodules
[ ${#submodules[@]} = 0 ] || base=$(git write-tree --missing-ok)
while IFS= read -r -d '' marker; do
    path=${marker#./} path=${path%/.git}
    if [ -n "${submodules[$path]:-}" ] || git check-ignore -q -- "$path"; then continue; fi
    exclude+=(":(exclude,literal)$path") nested+=("$path")
done < <(find . -mindepth 2 -name .git -prune -print0)

git add -A -- . "${exclude[@]}" >&2
for path in "${!submodules[@]}"; do
    [ "${submodules[$path]}" = merged ] || continue
    {
        git ls-files -z -- ":(literal)$path"
        (unset GIT_INDEX_FILE; git -C "$path" ls-files -z --cached --others --exclude-standard) |
            while IFS= read -r -d '' file; do
                if [ -f "$path/$file" ] || [ -h "$path/$file" ]; then printf '%s\0' "$path/$file"; fi
            done
    } | git update-index --add --remove -z --stdin >&2
done
for path in "${nested[@]}"; do
    { git ls-files -z -- ":(literal)$path"; find "$path" -name .git -prune -o \( -type f -o -type l \) -print0; } \
        | git update-index --add --remove -z --stdin >&2
done
"""
# Compare only the files written since the commit. $3 is the number of existing files; after their paths follow those of
# deleted files. An ignored file is skipped unless it is in the index.
_WRITTEN = r"""there=("${@:4:$3}") gone=("${@:4+$3}")
if [ ${#gone[@]} != 0 ]; then printf '%s\0' "${gone[@]}" | git update-index --force-remove -z --stdin >&2; fi
if [ ${#there[@]} != 0 ]; then
    printf '%s\0' "${there[@]}" | git --literal-pathspecs check-ignore -z --stdin > "$work/ignored" || [ $? = 1 ]
    declare -A ignored=()
    while IFS= read -r -d '' path; do ignored[$path]=1; done < "$work/ignored"
    for path in "${there[@]}"; do [ -n "${ignored[$path]:-}" ] || printf '%s\0' "$path"; done \
        | git update-index --add --replace -z --stdin >&2
fi
"""
_END = r"""git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --no-relative \
    --ignore-submodules=all --unified=3 --inter-hunk-context=0 --diff-algorithm=myers \
    --src-prefix=a/ --dst-prefix=b/ "$base" > "$work/patch"
"""
_WHOLE_PATCH = _BEGIN + _WHOLE + _END
_WRITTEN_PATCH = _BEGIN + _WRITTEN + _END


_LOOKING = 30.0
"""Seconds after which the search for written files gives up and git compares the whole repository."""
_MOST_WRITTEN = 1 << 16
"""Limit for the paths of written files in characters, because they are arguments of a command. Beyond it, git compares
the whole repository."""
_MOST_FOUND = 4 * _MOST_WRITTEN
"""Limit for all changed paths in characters, with directories and git's own files. Beyond it, git compares the whole
repository."""
_SHAPING = (".git", ".gitignore", ".gitattributes", ".gitmodules")
"""Names of files that affect how git treats other files."""
_GITS_OWN = ("COMMIT_EDITMSG", "FETCH_HEAD", "HEAD", "ORIG_HEAD", "index", "logs", "packed-refs")
"""Names in ``.git`` of files that git itself writes and that do not affect a patch."""
_HELD = (
    "something may hold git for ever, such as a FIFO in place of a file of the repository; changes() asks nothing "
    "inside; a large repository may need a larger timeout"
)


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a repository that were written since its commit, and so may differ from it.

    Attributes:
        existing: paths of existing files, relative to the repository.
        deleted: paths of deleted files.
    """

    existing: tuple[str, ...]
    deleted: tuple[str, ...]

    @property
    def any(self) -> bool:
        """Whether any file was written or deleted."""
        return bool(self.existing or self.deleted)

    def arguments(self) -> list[str]:
        """Return the script's arguments for these files."""
        return [str(len(self.existing)), *self.existing, *self.deleted]


def written_files(changes: Iterable[Change], repository: PurePosixPath) -> Written | None:
    """Return the files that git must compare in a repository whose commit is in the image.

    Args:
        changes: changes to the image.
        repository: absolute path of the repository.

    Returns:
        The written files, or None if git must compare the whole repository: a change may affect how git treats
        unchanged files, a change is not one of files, or there are too many.
    """
    existing: list[str] = []
    deleted: list[str] = []
    size = 0
    for change in changes:
        if not change.path.is_relative_to(repository):
            if repository.is_relative_to(change.path):
                return None  # a directory above was replaced
            continue
        path = change.path.relative_to(repository)
        if _is_gits_own(path, change.kind):
            continue
        if change.path == repository or not set(_SHAPING).isdisjoint(path.parts):
            return None
        if change.type in (FileType.FILE, FileType.SYMLINK):
            (deleted if change.kind is ChangeKind.DELETED else existing).append(str(path))
            size += len(str(path))
        elif change.kind is ChangeKind.MODIFIED:  # the path may have been a file
            return None
    return None if size > _MOST_WRITTEN else Written(tuple(existing), tuple(deleted))


def _is_gits_own(path: PurePosixPath, kind: ChangeKind) -> bool:
    match path.parts:
        case (".git", name, *_) if name in _GITS_OWN:
            return kind is not ChangeKind.DELETED
        case (".git", "objects", subdirectory, *_):
            return kind is ChangeKind.ADDED and subdirectory != "info"
        case (".git", "refs", "heads" | "tags" | "remotes" | "stash", *_):
            return True
    return False


def _checked_patch(result: ExecResult, patch: bytes) -> bytes:
    """Return the patch if the script succeeded.

    Raises:
        CommandFailed: the script failed.
    """
    if not result.ok:
        short_result = replace(result, command="git diff")  # the command is pages long
        raise CommandFailed(short_result, hint=_HELD if result.outcome is Outcome.TIMEOUT else None)
    return patch


def find_written(
    core: SandboxCore, path: str | PurePosixPath | None, *, base: str | None, timeout: float | None
) -> Written | None:
    """Return the files that git must compare for a patch, or None if it must compare the whole repository.

    It blocks until a second sandbox has listed the changes.
    """
    check_timeout(timeout)
    if path is not None:
        check_path("path", path)
    image = core.image
    if not image.clean or (base or image.base_commit) != image.base_commit:
        return None
    if PurePosixPath(path or image.workdir) != image.workdir:
        return None
    try:
        changes = core.changes(image.workdir, _LOOKING if timeout is None else min(timeout, _LOOKING), _MOST_FOUND)
    except (MiniSandboxError, OSError):  # the full comparison reports the error if it fails too
        return None
    return written_files(changes, image.workdir) if core.alive else None


def make_patch(
    core: SandboxCore,
    path: str | PurePosixPath | None,
    written: Written | None,
    *,
    base: str | None,
    limit: int | None,
    timeout: float | None,
) -> Operation[bytes]:
    """Compare a repository with a commit; see :meth:`minisandbox.Sandbox.patch`.

    Args:
        core: the sandbox.
        path: the repository.
        written: the files to compare; None: the whole repository.
        base: the commit to compare with; None: the commit of the image.
        limit: maximum size of the patch in bytes, or None.
        timeout: wall-clock seconds for each run of git, or None.
    """
    if written is not None and not written.any:
        return b""
    work_directory = f"/tmp/patch.{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox, with an unguessable name
    script, file_arguments = (_WHOLE_PATCH, []) if written is None else (_WRITTEN_PATCH, written.arguments())
    command = ["bash", "-c", script, "patch", base or core.image.base_commit, work_directory, *file_arguments]
    result = yield from _run_as_owner(core, command, path, timeout)
    sink = io.BytesIO()
    discard = file_operations.remove(work_directory, cwd="/", recursive=True, missing_ok=True)
    try:
        if result.ok:
            yield from file_operations.read(f"{work_directory}/patch", cwd="/", limit=limit, sink=sink)
    except FileAccessError:  # no finally block, because an interrupted caller makes no further call
        yield from discard
        raise
    yield from discard
    if written is not None and result.outcome is Outcome.EXITED and not result.ok:  # git refused a written file
        return (yield from make_patch(core, path, None, base=base, limit=limit, timeout=timeout))
    return _checked_patch(result, sink.getvalue())


def _run_as_owner(
    core: SandboxCore, command: Sequence[str], path: str | PurePosixPath | None, timeout: float | None
) -> Operation[ExecResult]:
    """Run git as the owner of the repository: git refuses other users, and runs programs named in its configuration."""
    owner = 0
    with contextlib.suppress(FileAccessError):  # git itself reports the error
        owner = (yield from file_operations.stat(".", cwd=directory(core, path))).uid
    if owner != 0:
        with contextlib.suppress(InvalidValue):  # the sandbox has a single id: run as root
            return (yield from run(core, command, cwd=path, timeout=timeout, user=owner))
    return (yield from run(core, command, cwd=path, timeout=timeout, user=0))
