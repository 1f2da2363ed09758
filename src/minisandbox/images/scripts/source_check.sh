rm -rf .git
find . ! -type l \( ! -perm -644 -o -perm /022 -o \( -type d -o -perm /111 \) ! -perm -111 \) \
    -exec chmod u+rwX,go+rX,go-w {} +
chmod 755 .
[ -n "$(find . -mindepth 1 -print -quit)" ] || { echo "the source has no files"; exit 1; }
settle .
