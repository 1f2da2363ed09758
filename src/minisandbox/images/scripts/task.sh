# From the installed, clean source to what an agent gets: the patch applied, hidden files gone, one commit.
clean=${CLEAN-/run/minisandbox/source$INSIDE}  # the source as it was unpacked
apply_patch

while IFS= read -r -d '' path; do drop_bytecode "$path"; done < /tmp/build/touched
while IFS= read -r -d '' path; do
    [ -f "$path" ] || [ -h "$path" ] || { echo "hidden file $path is not in the source"; exit 66; }
    drop_bytecode "$path"
    rm -f "$path"
done < /tmp/build/hidden

# What of the above had content in the source.
sought() {
    local path
    cat /tmp/build/touched /tmp/build/hidden | while IFS= read -r -d '' path; do
        if [ -f "$clean/$path" ] && [ -s "$clean/$path" ] && ! [ -h "$clean/$path" ]; then printf '%s\0' "$clean/$path"; fi
    done
}

# Copies of it that some installation made, each with the path of what it is one of: a hidden test or the unbroken code
# could be read there. Equal bytes make a copy, under whatever name; of a tiny file they do not, unless the name is equal.
copies() {
    local line sum path copy
    local -a sizes=(-false)
    local -A tiny=() known=()
    xargs -0r stat --printf '%s %n\0' < /tmp/build/sought > /tmp/build/sizes
    while IFS= read -r -d '' line; do
        sizes+=(-o -size "${line%% *}c")
        [ "${line%% *}" -ge 32 ] || tiny[${line#* }]=1
    done < /tmp/build/sizes
    xargs -0r sha256sum -z < /tmp/build/sought > /tmp/build/sums
    while IFS= read -r -d '' line; do
        sum=${line%% *} path=${line#*  }
        known[$sum/${path##*/}]=$path
        [ -n "${tiny[$path]-}" ] || known[$sum]=$path
    done < /tmp/build/sums
    find "$ROOT" -xdev -type f \( "${sizes[@]}" \) -print0 2> /dev/null |
        xargs -0r sha256sum -z 2> /dev/null |
        while IFS= read -r -d '' line; do
            sum=${line%% *} copy=${line#*  }
            path=${known[$sum/${copy##*/}]-${known[$sum]-}} path=${path#"$clean"/}
            [ -n "$path" ] || continue
            case $copy in "$WORKDIR"/*) [ -e "$clean/${copy#"$WORKDIR"/}" ] && continue ;; esac
            printf '%s\0' "$copy" "$path"
        done || true  # a directory may be closed
}
sought > /tmp/build/sought
copies > /tmp/build/copies
while IFS= read -r -d '' copy && IFS= read -r -d '' path; do
    drop_bytecode "$copy"
    case $copy in
        "$WORKDIR"/*) rm -f "$copy" ;;
        *) if [ -f "$path" ]; then cat "$path" > "$copy"; else rm -f "$copy"; fi ;;  # installed: what is there is used
    esac
done < /tmp/build/copies
settle .

# What is committed: the source's files, with the patch's; never what an installation made beside them.
mkdir /tmp/build/object-files
export GIT_OBJECT_DIRECTORY=/tmp/build/object-files  # where git finds an object it touches it, and so copies it up
{
    (cd "$clean" && find . \( -type f -o -type l \) -printf '%P\0')
    cat /tmp/build/touched
} | sort -zu | { grep -zvE '(^|/)\.git(/|$)' || true; } |
    git -c core.autocrlf=false update-index --add --remove -z --stdin

export GIT_AUTHOR_NAME=MiniSandbox GIT_AUTHOR_EMAIL=minisandbox@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00+0000'
export GIT_COMMITTER_NAME=$GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL=$GIT_AUTHOR_EMAIL GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
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
printf '# pack-refs with: peeled fully-peeled sorted \n%s refs/heads/main\n' "$commit" > .git/packed-refs  # no directories

# The rest is ignored, so that no patch of an agent has it.
git ls-files --others --directory --exclude-from=.git/info/exclude -z | sed -z -E 's/[][*?\\ ]/\\&/g; s|^|/|' |
    tr '\n' '?' | tr '\0' '\n' > /tmp/build/ignored
[ ! -s /tmp/build/ignored ] || cat /tmp/build/ignored >> .git/info/exclude
rm -rf .git/logs .git/COMMIT_EDITMSG .git/ORIG_HEAD .git/FETCH_HEAD

# One commit, everything reachable, nothing changed: or there is no image. (Git itself wrote the blobs: none is read again.)
git status --porcelain > /tmp/build/status
git fsck --connectivity-only --unreachable --no-reflogs --no-progress > /tmp/build/unreachable
if [ "$(git rev-list --all --count)" != 1 ] || [ "$(git for-each-ref | wc -l)" != 1 ] ||
    [ -s /tmp/build/status ] || [ -s /tmp/build/unreachable ] || [ -n "$(git remote)" ]; then
    echo "the repository is not one clean commit:"
    cat /tmp/build/status /tmp/build/unreachable
    exit 1
fi
printf '%s' "$commit" > /tmp/build/commit
find .git -newermt 2001-01-01 -exec touch -h -d "$MOMENT" {} +
touch -d "${INDEX_MOMENT-$MOMENT + 1 minute}" .git/index  # else git would read every file that is as old again
[ "$(stat -c %u:%g .)" = "$(stat -c %u:%g .git)" ] || chown -hR --reference=. .git
