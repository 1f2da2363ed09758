# The host's copy of a prefix becomes the environment.
mkdir -p "$(dirname "$ENVIRONMENT")"
cp -a --no-preserve=ownership /run/minisandbox/prefix "$ENVIRONMENT"
settle "$ENVIRONMENT"
compile "$ENVIRONMENT/lib"
