clean=/run/minisandbox/source$INSIDE  # the source as it was unpacked
in_source() {
    [ -e "$clean/$1" ]
}
