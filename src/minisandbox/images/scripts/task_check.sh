printf '# pack-refs with: peeled fully-peeled sorted \n%s refs/heads/main\n' "$commit" > .git/packed-refs  # no directories

# The rest is ignored, so that no patch of an agent has it.
git ls-files --others --directory --exclude-from=.git/info/exclude -z | sed -z -E 's/[][*?\\ ]/\\&/g; s|^|/|' |
    tr '\n' '?' | tr '\0' '\n' > /tmp/build/ignored
[ ! -s /tmp/build/ignored ] || cat /tmp/build/ignored >> .git/info/exclude
rm -rf .git/logs .git/COMMIT_EDITMSG .git/ORIG_HEAD .git/FETCH_HEAD

# One commit, everything reachable, nothing changed: or there is no image. (Git itself wrote the blobs: none is read again.)
git status --porcelain > /tmp/build/status
git fsck --connectivity-only --unreachable --no-reflogs --no-progress > /tmp/build/unreachable
if [ "$(git rev-list --all --count)" != 1 ] || [ "$(git for-each-ref | wc -l)" != 1 ] ||
    [ -s /tmp/build/status ] || [ -s /tmp/build/unreachable ] || [ -n "$(git remote)" ]; then
    echo "the repository is not one clean commit:"
    cat /tmp/build/status /tmp/build/unreachable
    exit 1
fi
printf '%s' "$commit" > /tmp/build/commit
find .git -newermt 2001-01-01 -exec touch -h -d "$MOMENT" {} +
touch -d "${INDEX_MOMENT-$MOMENT + 1 minute}" .git/index  # else git would read every file that is as old again
[ "$(stat -c %u:%g .)" = "$(stat -c %u:%g .git)" ] || chown -hR --reference=. .git
