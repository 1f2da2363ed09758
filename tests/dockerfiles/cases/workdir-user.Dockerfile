FROM minibase
RUN useradd -u 1234 joe
USER joe
WORKDIR /work/dir
