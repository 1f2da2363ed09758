# The objects of a source's files, each a file: tasks of the repository stand on it, and each hides those it does not have.
git -c core.logAllRefUpdates=false init --quiet --template= --initial-branch=main .
git config core.checkStat minimal  # inode numbers differ in every sandbox; without this git would read every file again
git config core.trustctime false
git config gc.auto 0  # many packs and objects are meant here
find . -path ./.git -prune -o \( -type f -o -type l \) -printf '%P\0' | sort -z |
    { grep -zvE '(^|/)\.git(/|$)' || true; } |
    git -c core.autocrlf=false -c core.looseCompression=9 update-index --add -z --stdin
tree=$(git -c core.looseCompression=9 write-tree)
rm ".git/objects/${tree:0:2}/${tree:2}"  # every other task has another one, and would have to hide it
rmdir --ignore-fail-on-non-empty ".git/objects/${tree:0:2}"
rm -rf .git/index .git/hooks .git/branches .git/logs .git/description .git/objects/info .git/objects/pack .git/refs/tags
mkdir .git/info
printf '%s\n' '__pycache__/' '*.py[co]' '.pytest_cache/' '.hypothesis/' > .git/info/exclude
find .git -exec touch -h -d "$MOMENT" {} +
