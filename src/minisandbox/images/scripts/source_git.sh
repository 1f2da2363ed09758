# The pack of one tree becomes files; no repository stays.
export GIT_DIR=/tmp/build/fetched.git
git init --quiet --bare --template= "$GIT_DIR"
git index-pack --stdin --threads=1 < /run/minisandbox/pack > /tmp/build/pack.log
git read-tree "$GIT_TREE"
git -c core.autocrlf=false --work-tree=/testbed checkout-index --all --force
