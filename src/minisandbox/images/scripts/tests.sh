# The tests that an agent must not see, clean, under /hidden; made over the installed source.
hidden=$ROOT/hidden
mkdir -p /tmp/build/tests "$hidden"
take() {
    if [ -f "$1" ] || [ -h "$1" ]; then cp -a --no-preserve=ownership --parents "$1" /tmp/build/tests/; fi
}
while IFS= read -r -d '' path; do
    [ -f "$path" ] || [ -h "$path" ] || { echo "hidden file $path is not in the source"; exit 66; }
    take "$path"
done < /tmp/build/hidden
while IFS= read -r -d '' path; do take "$path"; done < /tmp/build/touched
cd /tmp/build/tests
apply_patch
cp -a --no-preserve=ownership /tmp/build/tests/. "$hidden/"
settle "$hidden"
