FROM minibase
HEALTHCHECK --interval=30s --timeout=3s --start-period=1m --retries=4 CMD test -f /ok || exit 1
