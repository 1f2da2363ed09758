# The pack of one tree becomes files; no repository stays.
export GIT_DIR=/tmp/build/fetched.git
git init --quiet --bare --template= "$GIT_DIR"
git index-pack --stdin --threads=1 < /run/minisandbox/pack > /tmp/build/pack.log
git read-tree "$GIT_TREE"
git -c core.autocrlf=false --work-tree=. checkout-index --all --force

# What is not in the tree although a user of the project may expect it: told, never fetched.
git ls-tree -r -z "$GIT_TREE" | sed -z -n 's/^160000 commit [0-9a-f]*\t//p' | tr '\0' '\n' > /tmp/build/submodules
find . -type f -size -2 -exec grep -lF 'version https://git-lfs.github.com/spec/v1' {} + 2> /dev/null |
    sed 's|^[.]/||' | head -n 100 > /tmp/build/pointers || true
