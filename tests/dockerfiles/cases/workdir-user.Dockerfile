FROM minibase
RUN useradd -u 1234 joe
USER joe
WORKDIR /work/dir
#: differs /work the user owns it, as BuildKit makes it; buildah gives it to root
