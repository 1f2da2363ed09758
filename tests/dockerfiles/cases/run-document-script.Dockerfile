FROM devbase
RUN <<EOF
#!/usr/bin/env python3
open("/out", "w").write("by python\n")
EOF
