# Apply the patch, if there is one; status 65 if it does not fit. The files it changes are listed in /tmp/build/touched.
apply_patch() {
    [ -e /tmp/build/patch ] || return 0
    git apply --check /tmp/build/patch || exit 65
    git apply --whitespace=nowarn /tmp/build/patch
}

drop_bytecode() {
    local folder base
    folder=$(dirname "$1") base=$(basename "$1" .py)
    rm -f "$folder/__pycache__/$base".*.py[co] "$folder/$base".py[co]
}
