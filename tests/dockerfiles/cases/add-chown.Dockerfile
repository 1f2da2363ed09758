FROM minibase
ADD --chown=3:4 archive.tar.gz /x/
ADD --chown=5:6 a.txt /y
#: differs /x docker gives what is unpacked to that user; buildah keeps the owners of the archive
