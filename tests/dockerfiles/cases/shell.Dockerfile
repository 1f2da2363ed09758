FROM minibase
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN [[ 1 == 1 ]] && echo $BASH_VERSION > /out && rm /out && touch /yes
CMD run me
SHELL ["/bin/sh", "-c"]
ENTRYPOINT start $X
#: differs-config Cmd docker takes the shell of the line of CMD; buildah the last one
