# Our own tools, in a sandbox of the host's /usr: the image's tree is at $ROOT, and its repository at $WORKDIR.
[ "$(realpath -m "$WORKDIR")" = "$WORKDIR" ] || { echo "$INSIDE is a link: what is made there would not be in the image"; exit 1; }
mkdir -p "$WORKDIR"
cd "$WORKDIR"

# An empty repository here, as an agent gets it: nothing of templates, and files that differ in every sandbox told by time.
start_repository() {
    git -c core.logAllRefUpdates=false init --quiet --template= --initial-branch=main "$@" .
    git config core.checkStat minimal  # inode numbers differ in every sandbox; without this git would read every file again
    git config core.trustctime false
    git config gc.auto 0  # many packs and objects are meant here
    mkdir -p .git/info
    printf '%s\n' '__pycache__/' '*.py[co]' '.pytest_cache/' '.hypothesis/' > .git/info/exclude
}

trim_repository() {
    rm -rf .git/hooks .git/branches .git/logs .git/description .git/objects/info .git/objects/pack .git/refs/tags
}
