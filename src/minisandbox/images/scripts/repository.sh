# The objects of a source's files, each a file: tasks of the repository stand on it, and each hides those it does not have.
start_repository
find . -path ./.git -prune -o \( -type f -o -type l \) -printf '%P\0' | sort -z |
    { grep -zvE '(^|/)\.git(/|$)' || true; } |
    git -c core.autocrlf=false -c core.looseCompression=9 update-index --add -z --stdin
tree=$(git -c core.looseCompression=9 write-tree)
rm ".git/objects/${tree:0:2}/${tree:2}"  # every other task has another one, and would have to hide it
rmdir --ignore-fail-on-non-empty ".git/objects/${tree:0:2}"
rm -f .git/index
trim_repository
find .git -exec touch -h -d "$MOMENT" {} +
