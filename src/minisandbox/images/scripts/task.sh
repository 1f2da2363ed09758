# From the installed, clean source to what an agent gets: the patch applied, hidden files gone, one commit.
clean=/run/minisandbox/source  # the source as it was unpacked
cd /testbed
[ "$(pwd -P)" = /testbed ] || { echo "/testbed is a link: what is made there would not be in the image"; exit 1; }
apply_patch

# Copies of a file that some installation made: a hidden test or the unbroken code could be read there.
copies() {
    [ -s "$clean/$1" ] || return 0
    find /testbed "$ENVIRONMENT" -xdev -type f -name "$(basename "$1")" -print0 2> /dev/null |
        while IFS= read -r -d '' copy; do
            if ! [ -e "$clean/${copy#/testbed/}" ] && cmp -s "$copy" "$clean/$1"; then
                printf '%s\0' "$copy"
            fi
        done || true  # there may be no environment to look in
}
: > /tmp/build/copies
while IFS= read -r -d '' path; do
    drop_bytecode "$path"
    copies "$path" | while IFS= read -r -d '' copy; do
        case $copy in
            /testbed/*) drop_bytecode "$copy" && rm -f "$copy" ;;
            *) printf '%s\n' "$copy" >> /tmp/build/copies ;;
        esac
    done
done < /tmp/build/touched
while IFS= read -r -d '' path; do
    [ -f "$path" ] || [ -h "$path" ] || { echo "hidden file $path is not in the source"; exit 66; }
    drop_bytecode "$path"
    copies "$path" | while IFS= read -r -d '' copy; do
        drop_bytecode "$copy"
        rm -f "$copy"
    done
    rm -f "$path"
done < /tmp/build/hidden
settle /testbed

# One pack would be new for every task. Pieces whose borders depend on their content alone are equal files in all tasks
# that share what is in them, and the store keeps equal files once. The commit and its tree are always new.
pack_in_pieces() {
    local every=8 list
    mkdir /tmp/build/pieces
    git rev-list --objects HEAD | cut -d' ' -f1 | git cat-file --batch-check='%(objecttype) %(objectname)' > /tmp/build/objects
    while [ $((every * 64)) -lt "$(wc -l < /tmp/build/objects)" ]; do every=$((every * 2)); done
    awk -v every="$every" '
        function border(name) { return index("0123456789abcdef", substr(name, 1, 1)) * 256 \
            + index("0123456789abcdef", substr(name, 2, 1)) * 16 + index("0123456789abcdef", substr(name, 3, 1)) }
        NR < 3 { print $2 > "/tmp/build/pieces/top"; next }
        { if (border($2) % every == 0 && count[$1]) { close(file[$1]); number[$1]++ }
          count[$1]++; file[$1] = "/tmp/build/pieces/" $1 "-" (number[$1] + 0); print $2 > file[$1] }' /tmp/build/objects
    for list in /tmp/build/pieces/*; do
        git -c pack.writeReverseIndex=false pack-objects --quiet --threads=1 --window=0 .git/objects/pack/pack < "$list" > /dev/null
    done
    git prune-packed
}

# What is committed: the source's files, with the patch's; never what an installation made beside them.
git -c core.logAllRefUpdates=false init --quiet --template= --initial-branch=main .
git config core.checkStat minimal  # inode numbers differ in every sandbox; without this git would read every file again
git config core.trustctime false
mkdir -p .git/info
{
    (cd "$clean" && find . \( -type f -o -type l \) -printf '%P\0')
    cat /tmp/build/touched
} | sort -zu | { grep -zvE '(^|/)\.git(/|$)' || true; } |
    git -c core.autocrlf=false update-index --add --remove -z --stdin

export GIT_AUTHOR_NAME=MiniSandbox GIT_AUTHOR_EMAIL=minisandbox@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00+0000'
export GIT_COMMITTER_NAME=$GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL=$GIT_AUTHOR_EMAIL GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
commit=$(git commit-tree -m 'Initial commit' "$(git write-tree)")
git -c core.logAllRefUpdates=false update-ref refs/heads/main "$commit"

# The rest is ignored, so that no patch of an agent has it.
{
    printf '%s\n' '__pycache__/' '*.py[co]' '.pytest_cache/' '.hypothesis/'
    git ls-files --others --directory -z | sed -z -E 's/[][*?\\ ]/\\&/g; s|^|/|' | tr '\n' '?' | tr '\0' '\n'
} > .git/info/exclude
pack_in_pieces
git config gc.auto 0  # many packs are meant here
rm -rf .git/hooks .git/branches .git/logs .git/description .git/COMMIT_EDITMSG .git/ORIG_HEAD .git/FETCH_HEAD

# One commit, everything reachable, nothing changed: or there is no image.
git status --porcelain > /tmp/build/status
git fsck --unreachable --no-reflogs --no-progress > /tmp/build/unreachable
if [ "$(git rev-list --all --count)" != 1 ] || [ "$(git for-each-ref | wc -l)" != 1 ] ||
    [ -s /tmp/build/status ] || [ -s /tmp/build/unreachable ] || [ -n "$(git remote)" ]; then
    echo "the repository is not one clean commit:"
    cat /tmp/build/status /tmp/build/unreachable
    exit 1
fi
printf '%s' "$commit" > /tmp/build/commit
find .git -exec touch -h -d "$MOMENT" {} +
touch -d "$MOMENT + 1 minute" .git/index  # else git would read every file that is as old again
