# Adapted: the form of Multi-SWE-bench's Go images.
# Different here: golang is Debian's, the clone a COPY.
FROM devbase
ENV GOFLAGS=-mod=mod GOCACHE=/tmp/gocache GOTOOLCHAIN=local
COPY go /srv/repo/app
COPY proj/fix.patch /home/fix.patch
WORKDIR /srv/repo/app
RUN go vet ./... && go test ./... && rm -rf /tmp/gocache
RUN printf '#!/bin/bash\nset -e\ncd /srv/repo/app\ngo test -v ./...\n' > /home/run.sh && chmod +x /home/run.sh
