# Our own tools, in a sandbox of the host's /usr: the image's tree is at $ROOT, and its repository at $WORKDIR.
[ "$(realpath -m "$WORKDIR")" = "$WORKDIR" ] || { echo "$INSIDE is a link: what is made there would not be in the image"; exit 1; }
mkdir -p "$WORKDIR"
cd "$WORKDIR"
