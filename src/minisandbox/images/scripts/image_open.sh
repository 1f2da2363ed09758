# An image's own repository, with its files at the commit.
open_repository
if [ -n "$HEAD_COMMIT" ]; then
    ours read-tree "${COMMIT:-$HEAD_COMMIT}"
    merge_submodules "$([ "${COMMIT:-$HEAD_COMMIT}" = "$HEAD_COMMIT" ] || echo linked)"
    ours update-index -q --refresh > /tmp/build/changed || true  # what it did not commit is committed here
else
    ours add --all . 2> /tmp/build/changed
    merge_submodules
fi
ours ls-files -z > /tmp/build/tracked
[ -s /tmp/build/tracked ] || { echo "$INSIDE has no files of a repository"; exit 1; }
clean=/tmp/build/clean
mkdir "$clean"
cat /tmp/build/touched /tmp/build/hidden | while IFS= read -r -d '' path; do
    [ ! -f "$path" ] || [ -h "$path" ] || cp --parents -- "$path" "$clean/"
done
in_source() {
    grep -zqxF -e "$1" /tmp/build/tracked
}
