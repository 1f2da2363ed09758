rm -rf /testbed/.git
chmod -R u+rwX,go+rX,go-w /testbed
chmod 755 /testbed
[ -n "$(find /testbed -mindepth 1 -print -quit)" ] || { echo "the source has no files"; exit 1; }
settle /testbed
