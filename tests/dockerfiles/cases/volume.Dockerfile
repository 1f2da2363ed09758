FROM minibase
VOLUME /data /logs
VOLUME ["/with space"]
#: differs /data /logs "/with space" buildah makes the directories of volumes, docker does so when a container starts
