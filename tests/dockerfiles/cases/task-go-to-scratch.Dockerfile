# Adapted: the form of a Go task that ships one binary.
# Different here: golang is Debian's.
FROM devbase AS build
WORKDIR /src
COPY go/go.mod ./
COPY go/*.go ./
RUN CGO_ENABLED=0 GOCACHE=/tmp/c go build -trimpath -ldflags="-s -w -buildid=" -o /out/app . && rm -rf /tmp/c
FROM scratch
COPY --from=build /out/app /app
USER 65534:65534
ENTRYPOINT ["/app"]
