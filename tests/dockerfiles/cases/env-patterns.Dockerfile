FROM minibase
ENV V=foo/bar.tar.gz
ENV A=${V#*/} B=${V##*.} C=${V%.*} D=${V%%.*} F=${V/foo/x} G=${V//a/A}
