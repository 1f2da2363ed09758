# After the recipe's own commands.
settle /testbed
if [ -x "$PYTHON" ]; then
    settle "$ENVIRONMENT"
    compile "$(site_packages)"
fi
