# Every build step begins with this. What it needs lies in /run/minisandbox (mounts) and /tmp/build (its own files).
set -euo pipefail
exec 2>&1
umask 022
PYTHON=${ENVIRONMENT-}/bin/python
# Equal files of different builds must have equal mtimes to be stored once. Each kind of step has a moment of its own, later
# than those below it: a source that a step changes must not fit the byte code that a step below made of the old one.
MOMENT="2000-01-01 00:00:00 UTC + $RANK hours"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CEILING_DIRECTORIES=/ PYTHONHASHSEED=0

# Give everything this step wrote below the given directories the one mtime; byte code keeps the one it was made for.
settle() {
    find "$@" -xdev ! -type d -newermt 2001-01-01 ! -name '*.py[co]' -exec touch -h -d "$MOMENT" {} +
}

# Byte code at build time, not at first use: old packages' SyntaxWarnings would otherwise change outcomes later. The tests
# of installed packages, which nobody imports, take as much of it as the packages (measured: scipy, pandas).
compile() {
    local jobs
    jobs=$("$PYTHON" -E -s -c 'import sys; print("-j0" if sys.version_info >= (3, 5) else "")')
    "$PYTHON" -m compileall -q $jobs -x '/site-packages/.*/tests?/' "$@" > /tmp/build/compile.log || true  # files for other Python versions do not compile
    find "$@" -xdev -name '*.py[co]' -newermt 2001-01-01 -exec touch -h -d "$MOMENT" {} +
}

site_packages() {
    "$PYTHON" -I -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2> /dev/null ||
        "$PYTHON" -E -s -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}
