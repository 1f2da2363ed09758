#!/usr/bin/env bash
# git 2.39.5, GNU patch 2.7.6 (Debian 12): `patch` after a failed `git apply --reject` takes the first hunk back.
#
# Expected: `git apply --reject`, or else `patch --batch --fuzz=5`, applies what either of them can apply.
# Observed: --reject leaves the hunks that fit in the file. `patch --batch` then takes the patch for one that is applied
#           already, reverts its first hunk ("Assuming -R") and fails at the second. Alone, patch applies both hunks. By the
#           same rule, a second patch --batch takes all of the first one back, with status 0.
# Why it matters: harnesses try these commands in this order (swebench 4.1.0, swesmith 0.0.9). Restore the tree between two
#           attempts, and pass --forward.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
echo "$(git --version), recorded with 2.39.5; $(patch --version | head -n 1), recorded with 2.7.6"

seq 1 30 >file
cat >fix.patch <<'END'
--- a/file
+++ b/file
@@ -1,5 +1,5 @@
 1
-2
+two
 3
 4
 5
@@ -25,6 +25,6 @@
 25
 26
 not quite 27
-28
+twenty-eight
 29
 30
END
run() {
    local status=0
    "$@" >log 2>&1 || status=$?
    echo "$*: status $status, changed lines: ($(seq 1 30 | diff - file | sed -n 's/^> //p' | xargs))"
}
{
    run git apply --reject fix.patch
    run patch --batch --fuzz=5 -p1 -i fix.patch
    seq 1 30 >file
    echo 'in a fresh tree:'
    run patch --batch --fuzz=5 -p1 -i fix.patch
    run patch --batch --fuzz=5 -p1 -i fix.patch
} >observed
cat observed
diff - observed <<'END' || { echo "git apply --reject or patch --batch has changed" >&2; exit 1; }
git apply --reject fix.patch: status 1, changed lines: (two)
patch --batch --fuzz=5 -p1 -i fix.patch: status 1, changed lines: ()
in a fresh tree:
patch --batch --fuzz=5 -p1 -i fix.patch: status 0, changed lines: (two twenty-eight)
patch --batch --fuzz=5 -p1 -i fix.patch: status 0, changed lines: ()
END
