# The repository that a container image has at its workdir, whatever its owner, its place and its configuration. Ours
# reads its objects and nothing else: none of its hooks, filters and settings has an effect.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
OURS=/tmp/build/repository.git
touch /tmp/build/begun
sleep 0.05  # a file's change time is as coarse as the kernel's clock

# Files of an image keep their times. Those that this step wrote get the one time, and the repository's owner.
settle() {
    find "$@" -xdev ! -type d -newercm /tmp/build/begun -exec chown -h --reference="$WORKDIR" {} + \
        ! -name '*.py[co]' -exec touch -h -d "$MOMENT" {} +
}

# A path of the image as a path below $ROOT, without links.
resolved() {
    local rest=$1 found='' part target links=0
    while [ -n "$rest" ]; do
        while [ "${rest#/}" != "$rest" ]; do rest=${rest#/}; done
        part=${rest%%/*} rest=${rest#"${rest%%/*}"}
        case $part in
            '' | .) continue ;;
            ..) found=${found%/*} && continue ;;
        esac
        if [ -h "$ROOT$found/$part" ]; then
            links=$((links + 1))
            [ "$links" -le 40 ] || { echo "too many links in $1" >&2; exit 1; }
            target=$(readlink "$ROOT$found/$part")
            [ "${target#/}" = "$target" ] || found=''
            rest=$target$rest
        else
            found=$found/$part
        fi
    done
    printf '%s' "$ROOT$found"
}

# What a file of git names, relative to a directory of the image.
named() {
    case $2 in /*) resolved "$2" ;; *) resolved "$1/$2" ;; esac
}

# Sets GIT (the directory of HEAD and index), COMMON (that of refs and objects) and STORES (of objects) of the repository
# at a directory of the image; status 1: there is none, and GIT is empty unless .git leads nowhere.
find_repository() {
    local line store number
    GIT='' COMMON='' STORES=()
    [ -e "$ROOT$1/.git" ] || [ -h "$ROOT$1/.git" ] || return 1
    GIT=$(resolved "$1/.git")
    if [ -f "$GIT" ]; then  # of a worktree, or of a submodule
        GIT=$(named "$1" "$(sed -n '1s/^gitdir: //p' "$GIT")")
    fi
    [ -f "$GIT/HEAD" ] || [ -h "$GIT/HEAD" ] || return 1
    COMMON=$GIT
    [ ! -f "$GIT/commondir" ] || COMMON=$(named "${GIT#"$ROOT"}" "$(head -n 1 "$GIT/commondir")")
    STORES=("$(resolved "${COMMON#"$ROOT"}/objects")")
    for ((number = 0; number < ${#STORES[@]} && number < 50; number++)); do
        store=${STORES[number]}
        [ -f "$store/info/alternates" ] || continue
        while IFS= read -r line; do
            case $line in '' | '#'*) ;; *) STORES+=("$(named "${store#"$ROOT"}" "$line")") ;; esac
        done < "$store/info/alternates"
    done
}

# Print the commit that is checked out in the repository that was found.
head_commit() {
    GIT_COMMON_DIR=$COMMON git --git-dir="$GIT" rev-parse --quiet --verify 'HEAD^0' 2> /dev/null ||
        GIT_COMMON_DIR=$COMMON git --git-dir="$GIT" rev-parse --quiet --verify HEAD
}

# Let ours read the objects of the repository that was found; list in HISTORY what must not stay of it.
borrow_objects() {
    printf '%s\n' "${STORES[@]}" >> "$OURS/objects/info/alternates"
    HISTORY+=("$GIT" "$COMMON" "${STORES[@]}")
}

# Make our repository over the image's objects; sets HEAD_COMMIT, "" where there is none.
open_repository() {
    local folder=$INSIDE
    HEAD_COMMIT='' HISTORY=() SUBMODULES=() format=sha1
    if find_repository "$INSIDE"; then
        HEAD_COMMIT=$(head_commit) || true
        [ "${#HEAD_COMMIT}" -le 40 ] || format=sha256
    elif [ -n "$GIT" ]; then
        echo "$INSIDE/.git leads to no repository"
        exit 1
    fi
    while [ -z "$GIT" ] && [ -n "${folder#/}" ]; do
        folder=${folder%/*}
        if [ -e "$ROOT$folder/.git" ]; then
            echo "$INSIDE lies in the repository at ${folder:-/}: name that as the workdir"
            exit 1
        fi
    done
    git init --quiet --template= --object-format="$format" --initial-branch=main "$OURS"
    OURS=$OURS/.git
    mkdir -p "$OURS/objects/info"
    [ -z "$GIT" ] || borrow_objects
}

ours() {
    git --git-dir="$OURS" --work-tree="$WORKDIR" -c core.autocrlf=false -c core.fileMode=true "$@"
}

# Whether the files are at the commit already is for git to say: it writes only those that differ.
reset_to() {
    local target
    [ "$1" != "$HEAD_COMMIT" ] || return 0
    if ! ours cat-file -e "$1^{commit}" 2> /dev/null; then
        echo "the repository at $INSIDE has no commit $1: its HEAD is ${HEAD_COMMIT:-nothing}"
        echo "is it another task's image? reset = false in the task's build takes its files unchanged"
        exit 1
    fi
    if [ -n "$HEAD_COMMIT" ]; then
        ours read-tree "$HEAD_COMMIT"
        merge_submodules
    fi
    ours update-index -q --refresh > /dev/null || true
    target=$(export GIT_INDEX_FILE=$OURS/target && ours read-tree "$1" && merge_submodules linked && ours write-tree)
    ours read-tree --reset -u "$target"
}

# Put the files of submodules into the index in place of their gitlinks: those of the commit that is checked out in each
# or, with "linked", of the commit that the gitlink names. Those that the image lacks are listed in /tmp/build/submodules.
merge_submodules() {
    local entry path
    : > /tmp/build/submodules
    : > /tmp/build/merged
    while ours ls-files -z --stage | { grep -z '^160000 ' || true; } > /tmp/build/gitlinks && [ -s /tmp/build/gitlinks ]; do
        while IFS= read -r -d '' entry; do
            path=${entry#*$'\t'}
            printf '%s\0' "$path" | ours update-index --force-remove -z --stdin
            if merge_submodule "$path" "$(cut -d' ' -f2 <<< "$entry")" "${1-}"; then
                printf '%s\n' "$path" >> /tmp/build/merged
            else
                printf '%s\n' "$path" >> /tmp/build/submodules
            fi
        done < /tmp/build/gitlinks
    done
}

# Put the files of the submodule at a path into the index, given the commit of its gitlink and whether that is "linked";
# status 1: the image has no files of it. Without a repository that has the commit, all files there are taken.
merge_submodule() {
    local path=$1 commit=$2 folder=${WORKDIR%/}/$1 head
    [ -d "$folder" ] && [ "$(resolved "$INSIDE/$path")" = "$folder" ] || return 1
    if find_repository "$INSIDE/$path" && head=$(head_commit); then
        [ "$3" = linked ] || commit=$head
        borrow_objects
        if ours cat-file -e "$commit^{tree}" 2> /dev/null; then
            SUBMODULES+=("$commit")
            ours read-tree --prefix="$path/" "$commit" || exit 1
            return
        fi
    fi
    rm -rf "$folder/.git"  # files below a repository would not be listed
    ours ls-files -z --others --exclude-standard -- ":(literal)$path" | { grep -zv '/$' || true; } > /tmp/build/loose
    [ -s /tmp/build/loose ] || return 1
    if [ "$3" = linked ] && [ "$(ours rev-parse --quiet --verify "$HEAD_COMMIT:$path")" != "$commit" ]; then
        echo "the submodule at $INSIDE/$path has no commit $commit to be reset to" >&2
        echo "reset = false in the task's build takes its files unchanged" >&2
        exit 1
    fi
    ours update-index --add -z --stdin < /tmp/build/loose || exit 1
}
