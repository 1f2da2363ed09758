#!/usr/bin/env bash
# unidiff 1.0.1, git 2.39.5 (Debian 12): file names that git quotes, and binary files.
#
# Expected: the path of a changed file is its name, and str() of a parsed diff is the diff.
# Observed: git quotes a name with a character outside of ASCII; unidiff returns it with quotes and octal escapes. str()
#           leaves out the content of binary files, so git refuses the diff.
# Why it matters: "which test files does this patch change" misses the quoted ones, so they are not reset or protected. A
#           patch that was filtered by unidiff no longer applies. Diff with `git -c core.quotePath=false`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'unidiff==1.0.1'
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
echo "$(git --version), recorded with 2.39.5"

git init -q project
cd project
echo 'one' >test_größe.py
printf '\0one' >image.png
git add -A
git commit -q -m first
echo 'two' >test_größe.py
printf '\0two' >image.png
cat >../observe.py <<'END'
from unidiff import PatchSet

diff = open("../diff").read()
patch = PatchSet(diff)
print("paths:", *(file.path for file in patch))
open("../written", "w").write(str(patch))
END
{
    git diff --binary >../diff
    ../venv/bin/python ../observe.py
    git reset -q --hard
    for name in diff written; do
        status=0
        git apply --check ../$name 2>../log || status=$?
        echo "git apply $name: status $status ($(cat ../log))"
    done
} >../observed
cat ../observed
diff - ../observed <<'END' || { echo "unidiff's reading of git's diffs has changed" >&2; exit 1; }
paths: image.png "test_gr\303\266\303\237e.py"
git apply diff: status 0 ()
git apply written: status 128 (error: patch with only garbage at line 3)
END
