# After the recipe's own commands.
[ "$(cd "$WORKDIR" && pwd -P)" = "$WORKDIR" ] || { echo "$WORKDIR is a link: what is made there would not be in the image"; exit 1; }
# A repository, a link or a file that they left as .git must not become the agent's.
rm -rf "$WORKDIR/.git"
settle "$WORKDIR"
if [ -x "$PYTHON" ]; then
    settle "$ENVIRONMENT"
    compile "$(site_packages)"
fi
