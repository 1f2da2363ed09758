# An archive of one directory (a source distribution) or, with STRIP=0, of files.
archive=/run/minisandbox/archive
if [ "$(head -c 2 "$archive")" = PK ]; then
    mkdir /tmp/build/unpacked
    unzip -q "$archive" -d /tmp/build/unpacked || python3 -m zipfile -e "$archive" /tmp/build/unpacked
    cp -a --no-preserve=ownership /tmp/build/unpacked/*/. "$WORKDIR"/
else
    tar -x -f "$archive" -C "$WORKDIR" --strip-components="$STRIP" --no-same-owner --no-same-permissions
fi
