ARG TAG=latest
ARG NAME=unused
FROM minibase:${TAG} AS one
ARG TAG
RUN echo "$TAG$NAME" > /one
FROM minibase
RUN echo "[$TAG]" > /two
COPY --from=one /one /one
