# The last thing in every build step: what tools left behind is no part of a layer.
cd ~root && rm -rf .cache .local/share/uv
find /var/tmp -mindepth 1 -delete
