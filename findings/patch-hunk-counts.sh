#!/usr/bin/env bash
# git 2.39.5, GNU patch 2.7.6 (Debian 12), unidiff 1.0.1: a hunk whose line counts are too low.
#
# Expected: a patch with wrong counts is refused, or all of its lines are applied.
# Observed: in a patch of one hunk, git apply, patch and unidiff all drop the lines beyond the count and report success. In
#           a patch of two hunks, patch also skips the second hunk and exits with 0; git apply and unidiff refuse it.
# Why it matters: language models miscount lines. Two graders then disagree about the same prediction, and half a fix is
#           graded as the whole one. Check the counts before applying.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'unidiff==1.0.1'
echo "$(git --version), recorded with 2.39.5; $(patch --version | head -n 1), recorded with 2.7.6"

cat >one.patch <<'END'
--- a/file
+++ b/file
@@ -8,2 +8,2 @@
 h
-i
+I
+new
END
cat >two.patch <<'END'
--- a/file
+++ b/file
@@ -1,2 +1,2 @@
 a
-b
+B
+new
@@ -8,2 +9,2 @@
 h
-i
+I
END
cat >read_patch.py <<'END'
import sys

from unidiff import PatchSet
from unidiff.errors import UnidiffParseError

try:
    patch = PatchSet(open(sys.argv[1]))
    print("added:", *(line.value.strip() for line in patch[0][0] if line.is_added))
except UnidiffParseError as error:
    print(type(error).__name__)
END
apply() {
    local name=$1 status=0
    printf '%s\n' a b c d e f g h i >file
    shift
    "$@" <"$name.patch" >log 2>&1 || status=$?
    echo "$name, $*: status $status, file: $(xargs <file)"
}
{
    for name in one two; do
        apply "$name" git apply
        apply "$name" patch --batch -p1
        echo "$name, unidiff: $(venv/bin/python read_patch.py "$name.patch")"
    done
} >observed
cat observed
diff - observed <<'END' || { echo "the treatment of wrong line counts has changed" >&2; exit 1; }
one, git apply: status 0, file: a b c d e f g h I
one, patch --batch -p1: status 0, file: a b c d e f g h I
one, unidiff: added: I
two, git apply: status 128, file: a b c d e f g h i
two, patch --batch -p1: status 0, file: a B c d e f g h i
two, unidiff: UnidiffParseError
END
