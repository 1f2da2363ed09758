FROM minibase
ARG V=3
ENV VERSION=v${V:-1}
RUN echo $VERSION > /out
#: arg V=4
