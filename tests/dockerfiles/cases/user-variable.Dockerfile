FROM minibase
ARG U=games
USER $U
RUN id -un > /tmp/who
