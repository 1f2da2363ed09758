# The pack of one tree becomes files; no repository stays.
export GIT_DIR=/tmp/build/fetched.git
git init --quiet --bare --template= "$GIT_DIR"
git index-pack --stdin --threads=1 < /run/minisandbox/pack > /tmp/build/pack.log
check_out() {
    mkdir -p "$1"
    git read-tree "$GIT_TREE"
    git -c core.autocrlf=false --work-tree="$1" checkout-index --all --force
}

# Another commit's files are there: only what differs is written, compared byte by byte, whatever attributes say of either.
exchange() {
    check_out /tmp/build/files
    mkdir "$GIT_DIR/info"
    echo '* !text !eol !crlf !working-tree-encoding -ident -filter' > "$GIT_DIR/info/attributes"
    export GIT_INDEX_FILE=/tmp/build/files.index
    git -c core.autocrlf=false --work-tree=/tmp/build/files add --all --force .
    cd /testbed
    git --work-tree=. ls-files --others -z | xargs -0 -r rm -f
    git --work-tree=. update-index -q --refresh || true  # it says which differ
    git -c core.autocrlf=false --work-tree=. checkout-index --all --force
    find . -mindepth 1 -depth -type d -empty -exec sh -c '[ -d "/tmp/build/files/$1" ] || rmdir "$1"' - {} \;
    (cd /tmp/build/files && find . -type d -empty -print0) | xargs -0 -r mkdir -p  # for submodules
    unset GIT_INDEX_FILE
}
if [ -z "$(find /testbed -mindepth 1 -print -quit)" ]; then check_out /testbed; else exchange; fi

# What is not in the tree although a user of the project may expect it: told, never fetched.
git ls-tree -r -z "$GIT_TREE" | sed -z -n 's/^160000 commit [0-9a-f]*\t//p' | tr '\0' '\n' > /tmp/build/submodules
find /testbed -type f -size -2 -exec grep -lF 'version https://git-lfs.github.com/spec/v1' {} + 2> /dev/null |
    sed 's|^/testbed/||' | head -n 100 > /tmp/build/pointers || true
