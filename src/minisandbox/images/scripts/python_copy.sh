# The host's copy of a prefix becomes the environment.
mkdir -p "$(dirname "$ENVIRONMENT")"
cp -a --no-preserve=ownership /run/minisandbox/prefix "$ENVIRONMENT"
chmod -R u+rwX,go+rX,go-w "$ENVIRONMENT"  # whatever the umask of whoever builds
settle "$ENVIRONMENT"
compile "$ENVIRONMENT/lib"
