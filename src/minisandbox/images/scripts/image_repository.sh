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

# Sets GIT (the directory of HEAD and index), COMMON (that of refs and objects) and STORES (of objects); status 1: none.
find_repository() {
    local folder line store
    GIT='' COMMON='' STORES=()
    if [ ! -e "$WORKDIR/.git" ] && [ ! -h "$WORKDIR/.git" ]; then
        folder=$INSIDE
        while [ -n "${folder#/}" ]; do
            folder=${folder%/*}
            if [ -e "$ROOT$folder/.git" ]; then
                echo "$INSIDE lies in the repository at ${folder:-/}: name that as the workdir"
                exit 1
            fi
        done
        return 1
    fi
    GIT=$(resolved "$INSIDE/.git")
    if [ -f "$GIT" ]; then  # of a worktree, or of a submodule
        GIT=$(named "$INSIDE" "$(sed -n '1s/^gitdir: //p' "$GIT")")
    fi
    [ -f "$GIT/HEAD" ] || [ -h "$GIT/HEAD" ] || { echo "$INSIDE/.git leads to no repository"; exit 1; }
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

# Makes our repository over the image's objects; sets HEAD_COMMIT, "" where there is none.
open_repository() {
    HEAD_COMMIT='' format=sha1
    if find_repository; then
        HEAD_COMMIT=$(GIT_COMMON_DIR=$COMMON git --git-dir="$GIT" rev-parse --quiet --verify 'HEAD^0' 2> /dev/null ||
            GIT_COMMON_DIR=$COMMON git --git-dir="$GIT" rev-parse --quiet --verify HEAD) || true
        [ "${#HEAD_COMMIT}" -le 40 ] || format=sha256
    fi
    git init --quiet --template= --object-format="$format" --initial-branch=main "$OURS"
    OURS=$OURS/.git
    mkdir -p "$OURS/objects/info"
    [ "${#STORES[@]}" = 0 ] || printf '%s\n' "${STORES[@]}" > "$OURS/objects/info/alternates"
}

ours() {
    git --git-dir="$OURS" --work-tree="$WORKDIR" -c core.autocrlf=false -c core.fileMode=true "$@"
}

# Whether the files are at the commit already is for git to say: it writes only those that differ.
reset_to() {
    [ "$1" != "$HEAD_COMMIT" ] || return 0
    if ! ours cat-file -e "$1^{commit}" 2> /dev/null; then
        echo "the repository at $INSIDE has no commit $1: its HEAD is ${HEAD_COMMIT:-nothing}"
        echo "is it another task's image? reset = false in the task's build takes its files unchanged"
        exit 1
    fi
    [ -z "$HEAD_COMMIT" ] || ours read-tree "$HEAD_COMMIT"
    ours update-index -q --refresh > /dev/null || true
    ours read-tree --reset -u "$1"
}
