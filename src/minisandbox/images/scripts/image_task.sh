# An image's own repository becomes an empty one; the files that it had at the commit lie where task.sh reads them.
CLEAN=/tmp/build/clean INDEX_MOMENT=now
open_repository
if [ -n "$HEAD_COMMIT" ]; then
    ours read-tree "${COMMIT:-$HEAD_COMMIT}"
else
    ours add --all . 2> /dev/null
fi
[ -n "$(ours ls-files | head -n 1)" ] || { echo "$INSIDE has no files of a repository"; exit 1; }
mkdir "$CLEAN"
ours -c core.checkStat=minimal checkout-index --all --force --prefix="$CLEAN/"

# Nothing of its history stays: here, in submodules, where a worktree or alternates lead, and in other clones.
find "$WORKDIR" -xdev -name .git -prune -exec rm -rf {} +
for place in "$GIT" "$COMMON" "${STORES[@]}"; do
    [ "${place##*/}" != objects ] || [ ! -e "${place%/*}/HEAD" ] || place=${place%/*}
    case $place in "" | "$ROOT" | "$ROOT/") ;; *) rm -rf "$place" ;; esac
done
rm -f "$OURS/objects/info/alternates"
find "$ROOT" -xdev -type d -name objects -prune -print0 2> /dev/null | while IFS= read -r -d '' place; do
    [ -f "${place%/*}/HEAD" ] && [ -n "$HEAD_COMMIT" ] || continue
    ! GIT_OBJECT_DIRECTORY=$place ours cat-file -e "${COMMIT:-$HEAD_COMMIT}" 2> /dev/null || rm -rf "${place%/*}"
done

start_repository --object-format="$format"
trim_repository
