# The commit is made of the image's own objects: they are neither read nor written again.
cat /tmp/build/tracked /tmp/build/touched | ours update-index --add --remove -z --stdin
commit=$(ours commit-tree -m 'Initial commit' "$(ours write-tree)")
mkdir /tmp/build/packs
ours rev-list --objects "$commit" | cut -d' ' -f1 |
    ours -c pack.writeReverseIndex=false pack-objects --quiet --threads=1 /tmp/build/packs/pack > /tmp/build/pack.log

# Nothing of its history stays: here, in submodules, where a worktree or alternates lead, and in other clones.
find "$WORKDIR" -xdev -name .git -prune -exec rm -rf {} +
for place in "${HISTORY[@]}"; do
    [ "${place##*/}" != objects ] || [ ! -e "${place%/*}/HEAD" ] || place=${place%/*}
    case $place in "" | "$ROOT" | "$ROOT/") ;; *) rm -rf "$place" ;; esac
done
rm -f "$OURS/objects/info/alternates"
find "$ROOT" -xdev -type d -name objects -prune -print0 2> /dev/null | while IFS= read -r -d '' place; do
    [ -f "${place%/*}/HEAD" ] || continue
    for old in ${COMMIT:-$HEAD_COMMIT} "${SUBMODULES[@]}"; do
        ! GIT_OBJECT_DIRECTORY=$place ours cat-file -e "$old" 2> /dev/null || rm -rf "${place%/*}"
    done
done

start_repository --object-format="$format"
trim_repository
mkdir .git/objects/pack
cp /tmp/build/packs/* .git/objects/pack/
cp "$OURS/index" .git/index
INDEX_MOMENT=now
