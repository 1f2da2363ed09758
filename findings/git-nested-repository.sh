#!/usr/bin/env bash
# git 2.39.5 (Debian 12): an agent's `git init` in a new folder loses its work, and survives git clean.
#
# Expected: `git add -A; git diff --cached` is the agent's work, and `git clean -fdx; git reset --hard` removes all of it.
# Observed: while the nested repository has no commit, `git add -A` fails and stages nothing at all, other files included.
#           With a commit, the diff holds one line "Subproject commit" for the folder. `git apply` of that diff exits with 0
#           and makes an empty folder. `git clean -fdx` leaves nested repositories alone.
# Why it matters: scaffolding tools call `git init`. The submission is empty or lacks the new package, and nothing fails.
#           Move nested .git folders away before collecting, and clean with -ffdx.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
echo "$(git --version), recorded with 2.39.5"

git init -q project
cd project
echo one >file
git add file
git commit -q -m first
git clone -q . ../fresh

echo two >file
git init -q package
echo code >package/module
status() { "$@" >"$work/log" 2>&1 && echo 0 || echo $?; }
{
    echo "git add -A, no commit in the nested repository: status $(status git add -A), staged: ($(git diff --cached --name-only))"
    git -C package add module
    git -C package commit -q -m first
    echo "git add -A, with a commit: status $(status git add -A), staged: ($(git diff --cached --name-only | xargs))"
    git diff --cached >../submission.patch
    grep -E '^\+[^+]' ../submission.patch | sed -E 's/[0-9a-f]{40}/COMMIT/'
    cd ../fresh
    echo "git apply: status $(status git apply ../submission.patch), package holds $(find package -mindepth 1 | wc -l) files"
    cd ../project
    git reset -q --hard 2>/dev/null
    git clean -q -fdx
    echo "after git reset --hard and git clean -fdx: ($(find . -name module))"
    git clean -q -ffdx
    echo "after git clean -ffdx: ($(find . -name module))"
} >../observed
cat ../observed
diff - ../observed <<'END' || { echo "git's treatment of nested repositories has changed" >&2; exit 1; }
git add -A, no commit in the nested repository: status 128, staged: ()
git add -A, with a commit: status 0, staged: (file package)
+two
+Subproject commit COMMIT
git apply: status 0, package holds 0 files
after git reset --hard and git clean -fdx: (./package/module)
after git clean -ffdx: ()
END
