# From the installed, clean source to what an agent gets: the patch applied, hidden files gone, one commit.
clean=/run/minisandbox/source  # the source as it was unpacked
cd /testbed
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
    find / $OWN_USR -xdev \( -path /tmp -o -path /proc \) -prune -o -type f \( "${sizes[@]}" \) -print0 2> /dev/null |
        xargs -0r sha256sum -z 2> /dev/null |
        while IFS= read -r -d '' line; do
            sum=${line%% *} copy=${line#*  }
            path=${known[$sum/${copy##*/}]-${known[$sum]-}} path=${path#"$clean"/}
            [ -n "$path" ] || continue
            case $copy in /testbed/*) [ -e "$clean/${copy#/testbed/}" ] && continue ;; esac
            printf '%s\0' "$copy" "$path"
        done || true  # a directory may be closed
}
sought > /tmp/build/sought
copies > /tmp/build/copies
while IFS= read -r -d '' copy && IFS= read -r -d '' path; do
    drop_bytecode "$copy"
    case $copy in
        /testbed/*) rm -f "$copy" ;;
        *) if [ -f "$path" ]; then cat "$path" > "$copy"; else rm -f "$copy"; fi ;;  # installed: what is there is used
    esac
done < /tmp/build/copies
settle /testbed

# What the repository below has of the commit stays there. The rest goes into packs: each object into the piece that the
# hash of its path names, so that tasks which have them in common have equal files, which the store keeps once. Pieces of
# some 16 kB, but no more than 64 of files: each costs every git command a look. What is packed again because its directory
# is hidden is in no other task's pieces, and goes into the first.
pack_in_pieces() {
    local list
    mkdir -p /tmp/build/pieces /tmp/build/packs .git/objects/pack
    LC_ALL=C awk '
        BEGIN { for (i = 1; i < 256; i++) code[sprintf("%c", i)] = i }
        function piece(path, of,    i, sum) {
            for (i = 1; i <= length(path); i++) sum = (sum * 31 + code[substr(path, i, 1)]) % 1000003
            return sum % of
        }
        { kind[NR] = $1; name[NR] = $2; path[NR] = substr($0, length($1 $2 $3) + 4) }
        $1 != "again" { bytes[$1] += $3; all += $3 }
        END {
            for (k in bytes) for (of[k] = 1; of[k] < 64 && of[k] * 16384 < bytes[k];) of[k] *= 2
            for (i = 1; i <= NR; i++) print i < 3 || all < 32768 || kind[i] == "again" ? "top" : kind[i] "-" piece(path[i], of[kind[i]]), name[i]
        }' "$1" | sort -s -k1,1 |
        awk '$1 != last { if (last) close(file); last = $1; file = "/tmp/build/pieces/" $1 } { print $2 > file }'
    for list in /tmp/build/pieces/*; do
        git -c pack.writeReverseIndex=false pack-objects --quiet --threads=1 --window=0 /tmp/build/packs/pack < "$list" > /dev/null
    done
    cp /tmp/build/packs/* .git/objects/pack/
}

# Objects that the commit does not have are removed. In the layer that costs a directory, a block, for each two digits of
# their names; or, where that is less, what else is in this directory: all of it is removed, and packed again. If both
# together are not much less than a repository of its own, none of those below is used.
store_objects() {
    git rev-list --objects "$commit" |
        git cat-file --batch-check='%(objecttype) %(objectname) %(objectsize:disk) %(rest)' > /tmp/build/objects
    find .git/objects -type f -printf '%P\n' | tr -d / > /tmp/build/below
    if ! awk '
        FILENAME ~ /below$/ { below[$1] = 1; next }
        { whole += $3; has[$2] = 1; if ($2 in below) kept[substr($2, 1, 2)] += $3 + 28; else own += $3 }
        END {
            for (name in below) if (!(name in has)) {
                folder = substr(name, 1, 2)
                cost = kept[folder] < 4096 ? kept[folder] : 4096
                if (!known[folder]++) { own += cost; if (cost < 4096) print folder > "/tmp/build/gone" }
                if (cost == 4096) print folder "/" substr(name, 3) > "/tmp/build/gone"
            }
            exit 2 * own > whole  # other tasks may have its packs too, but never its directories
        }' /tmp/build/below /tmp/build/objects; then
        rm -rf .git/objects
        mkdir .git/objects
        : > /tmp/build/below
    elif [ -e /tmp/build/gone ]; then
        (cd .git/objects && xargs -r rm -rf < /tmp/build/gone)
    fi
    find .git/objects -type f -printf '%P\n' | tr -d / > /tmp/build/left
    awk '
        FILENAME ~ /below$/ { below[$1] = 1; next }
        FILENAME ~ /left$/ { left[$1] = 1; next }
        $2 in left { next }
        $2 in below { $1 = "again" }
        { print }' /tmp/build/below /tmp/build/left /tmp/build/objects > /tmp/build/own
    pack_in_pieces /tmp/build/own
}

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
store_objects
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
touch -d "$MOMENT + 1 minute" .git/index  # else git would read every file that is as old again
