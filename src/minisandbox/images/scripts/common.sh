# Every build step begins with this. What it needs lies in /run/minisandbox (mounts) and /tmp/build (its own files).
set -euo pipefail
exec 2>&1
umask 022
ENVIRONMENT=/opt/miniconda3/envs/testbed
PYTHON=$ENVIRONMENT/bin/python
MOMENT=@946684800  # 2000-01-01: equal files of different builds must have equal mtimes to be stored once
export GIT_CONFIG_GLOBAL=/dev/null GIT_CEILING_DIRECTORIES=/ PYTHONHASHSEED=0

# Give everything this step wrote below the given directories the one mtime; byte code keeps the one it was made for.
settle() {
    find "$@" -xdev ! -type d -newermt 2001-01-01 ! -name '*.py[co]' -exec touch -h -d "$MOMENT" {} +
}

# Byte code at build time, not at first use: old packages' SyntaxWarnings would otherwise change outcomes later.
compile() {
    "$PYTHON" -m compileall -q "$@" > /tmp/build/compile.log || true  # files for other Python versions do not compile
    find "$@" -xdev -name '*.py[co]' -newermt 2001-01-01 -exec touch -h -d "$MOMENT" {} +
}

site_packages() {
    "$PYTHON" -I -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2> /dev/null ||
        "$PYTHON" -E -s -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

# The files that a patch changes, NUL-terminated; and where renamed ones come from.
touched() {
    git apply --numstat -z "$1" | while IFS= read -r -d '' line; do
        line=${line#*$'\t'}
        printf '%s\0' "${line#*$'\t'}"
    done
    sed -n -E 's/^(rename|copy) from ([^"].*)$/\2/p' "$1" | tr '\n' '\0'
}

# Apply the first reading of a patch that fits, and leave it as /tmp/build/applied; status 65 if none does.
apply_patch() {
    local reading
    for reading in "$1".*; do
        if git apply --check "$reading" 2> /dev/null; then
            git apply --whitespace=nowarn "$reading"
            cp "$reading" /tmp/build/applied
            return
        fi
    done
    git apply --check "$1.0" || true
    exit 65
}

drop_bytecode() {
    local folder base
    folder=$(dirname "$1") base=$(basename "$1" .py)
    rm -f "$folder/__pycache__/$base".*.py[co] "$folder/$base".py[co]
}
