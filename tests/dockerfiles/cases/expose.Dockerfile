FROM minibase
ARG P=9000
EXPOSE 80 443/tcp 53/udp
EXPOSE 8000-8002 $P
#: differs-config ExposedPorts docker lists the ports of a range; buildah keeps the range
