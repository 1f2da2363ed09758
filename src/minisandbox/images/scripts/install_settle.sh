# After the recipe's own commands.
[ "$(cd /testbed && pwd -P)" = /testbed ] || { echo "/testbed is a link: what is made there would not be in the image"; exit 1; }
# A repository, a link or a file that they left as .git must not become the agent's.
rm -rf /testbed/.git
settle /testbed
if [ -x "$PYTHON" ]; then
    settle "$ENVIRONMENT"
    compile "$(site_packages)"
fi
