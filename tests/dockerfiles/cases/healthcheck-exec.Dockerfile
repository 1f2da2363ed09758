FROM minibase
HEALTHCHECK --interval=1m30s CMD ["/bin/true"]
