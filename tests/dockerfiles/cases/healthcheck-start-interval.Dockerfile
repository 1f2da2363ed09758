FROM minibase
HEALTHCHECK --start-interval=2s --interval=10s CMD true
#: differs-config Healthcheck buildah 1.28 has no start interval
