# From clean files to those that an agent gets: the patch applied, hidden files gone. The files of the source that these
# were are below $clean; in_source says whether the source has a file.
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
            case $copy in "$WORKDIR"/*) in_source "${copy#"$WORKDIR"/}" && continue ;; esac
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
