# After the recipe's own commands. A repository, a link or a file that they left as .git must not become the agent's.
rm -rf /testbed/.git
settle /testbed
if [ -x "$PYTHON" ]; then
    settle "$ENVIRONMENT"
    compile "$(site_packages)"
fi
