FROM minibase
RUN --mount=type=cache,target=/cache echo x > /cache/f && cp /cache/f /out
RUN --mount=type=cache,target=/cache,id=other ls /cache > /empty
