export GIT_AUTHOR_NAME=MiniSandbox GIT_AUTHOR_EMAIL=minisandbox@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00+0000'
export GIT_COMMITTER_NAME=$GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL=$GIT_AUTHOR_EMAIL GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE

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
