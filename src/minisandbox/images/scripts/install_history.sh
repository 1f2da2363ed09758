# Tools that ask git for the project's version (setuptools_scm, versioneer, pbr and the like) get a history that answers as the
# source's own does: its last tag, and as many commits after it. It is gone when the installation is done.
if [ -n "$LAST_TAG" ] && grep -qsiE 'scm|vcs|versioneer|versioningit|dunamai|pbr|git.describe' setup.py setup.cfg pyproject.toml; then
    tag=${LAST_TAG%-*-g*} number=${LAST_TAG#"$tag"-}
    export GIT_AUTHOR_NAME=MiniSandbox GIT_AUTHOR_EMAIL=minisandbox@localhost
    git init --quiet --template= --initial-branch=main .
    git -c core.autocrlf=false add --all
    tree=$(git write-tree)
    for position in $(seq 0 "${number%-g*}"); do
        printf 'commit refs/heads/main\ncommitter MiniSandbox <minisandbox@localhost> 946684800 +0000\ndata 0\n'
        [ "$position" != 0 ] || printf 'M 040000 %s ""\n\nreset refs/tags/%s\nfrom refs/heads/main\n\n' "$tree" "$tag"
    done | git fast-import --quiet
    git ls-files -z | git update-index -z --assume-unchanged --stdin  # what the commands change is no other version
fi
