FROM minibase
ARG W=world
COPY <<EOF /hello
hello $W
EOF
COPY <<one <<"two" /d/
1 $W
one
2 $W
two
COPY --chmod=700 <<-EOF /script
	#!/bin/sh
	echo x
EOF
