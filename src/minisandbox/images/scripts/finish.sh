# The last thing in every build step: what tools left behind is no part of a layer.
rm -rf /root/.cache /root/.config /root/.local/share/uv /root/.pip
find /var/tmp -mindepth 1 -delete
