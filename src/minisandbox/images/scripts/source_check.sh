rm -rf /testbed/.git
# not chmod -R: it would copy up files of a commit below that are as they should be
find /testbed ! -type l \( ! -perm -644 -o -perm /022 -o \( -type d -o -perm /111 \) ! -perm -111 \) \
    -exec chmod u+rwX,go+rX,go-w {} +
chmod 755 /testbed
[ -n "$(find /testbed -mindepth 1 -print -quit)" ] || { echo "the source has no files"; exit 1; }
settle /testbed
