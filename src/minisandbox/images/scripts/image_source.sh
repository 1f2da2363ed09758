# What an image has of the task: its repository at the commit, and nothing that answers it elsewhere.
while IFS= read -r -d '' path; do
    rm -rf "$(resolved "$(dirname "$path")")/$(basename "$path")"
done < /tmp/build/remove
if [ -n "$COMMIT" ]; then
    open_repository
    [ -n "$HEAD_COMMIT" ] || { echo "there is no repository at $INSIDE to reset to $COMMIT"; exit 1; }
    reset_to "$COMMIT"
    settle .
fi
