# What is committed: the source's files, with the patch's; never what an installation made beside them.
mkdir /tmp/build/object-files
export GIT_OBJECT_DIRECTORY=/tmp/build/object-files  # where git finds an object it touches it, and so copies it up
{
    (cd "$clean" && find . \( -type f -o -type l \) -printf '%P\0')
    cat /tmp/build/touched
} | sort -zu | { grep -zvE '(^|/)\.git(/|$)' || true; } |
    git -c core.autocrlf=false update-index --add --remove -z --stdin

commit=$(git commit-tree -m 'Initial commit' "$(git write-tree)")

# The repository below has the objects of the source's files, each a file: those that the commit lacks go, its own come.
git rev-list --objects "$commit" | cut -d' ' -f1 | sort > /tmp/build/objects
find .git/objects -type f -printf '%P\n' | tr -d / | sort > /tmp/build/below
comm -13 /tmp/build/objects /tmp/build/below | sed 's|^..|.git/objects/&/|' | xargs -r rm -f
mkdir -p /tmp/build/packs .git/objects/pack
comm -23 /tmp/build/objects /tmp/build/below |
    git -c pack.writeReverseIndex=false pack-objects --quiet --threads=1 --window=0 /tmp/build/packs/pack > /dev/null
cp /tmp/build/packs/* .git/objects/pack/
unset GIT_OBJECT_DIRECTORY
