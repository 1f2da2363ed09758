FROM minibase
VOLUME /data /logs
VOLUME ["/with space"]
#: differs "/with space" buildah makes the directories of volumes, docker does so when a container starts
