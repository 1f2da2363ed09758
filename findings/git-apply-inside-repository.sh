#!/usr/bin/env bash
# git 2.39.5 (Debian 12): git apply reports success and changes nothing in a folder below another repository.
#
# Expected: `git apply` in a copy of a project (without .git) applies the patch, as it does in any folder, or fails.
# Observed: if a parent folder is a repository, git reads the paths of a patch made by git from that repository's root, skips
#           all files outside of the current folder, and exits with 0. --check exits with 0 too. Without the line
#           "diff --git", the same patch is applied.
# Why it matters: a harness that unpacks tasks below its own checkout grades the unpatched code. Set GIT_CEILING_DIRECTORIES,
#           or use `patch -p1`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_CEILING_DIRECTORIES=$work
echo "$(git --version), recorded with 2.39.5"

cat >fix.patch <<'END'
diff --git a/add.py b/add.py
--- a/add.py
+++ b/add.py
@@ -1 +1 @@
-print(1 - 1)
+print(1 + 1)
END
sed 1d fix.patch >plain.patch # without the line of git diff

apply() {
    local status=0
    mkdir -p "$1"
    echo 'print(1 - 1)' >"$1/add.py"
    (cd "$1" && shift && "$@" <"$work/$patch" >"$work/log" 2>&1) || status=$?
    echo "$patch, $*: status $status, $(cat "$1/add.py")"
}
git init -q checkout
{
    patch=fix.patch
    apply alone git apply
    patch=plain.patch
    apply checkout/task git apply
    patch=fix.patch
    apply checkout/task git apply
    apply checkout/task git apply --check
    apply checkout/task env GIT_CEILING_DIRECTORIES="$work/checkout" git apply | sed "s|$work/||"
    apply checkout/task patch -s -p1
} >observed
cat observed
diff - observed <<'END' || { echo "git apply below a repository has changed" >&2; exit 1; }
fix.patch, alone git apply: status 0, print(1 + 1)
plain.patch, checkout/task git apply: status 0, print(1 + 1)
fix.patch, checkout/task git apply: status 0, print(1 - 1)
fix.patch, checkout/task git apply --check: status 0, print(1 - 1)
fix.patch, checkout/task env GIT_CEILING_DIRECTORIES=checkout git apply: status 0, print(1 + 1)
fix.patch, checkout/task patch -s -p1: status 0, print(1 + 1)
END
