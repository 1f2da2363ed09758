# Adapted: the form of Multi-SWE-bench's C images.
# Different here: gcc is Debian's, the clone a COPY.
FROM devbase
COPY c/ /srv/repo/app/
WORKDIR /srv/repo/app
RUN make CFLAGS=-g0 && make test > /home/out && rm app
CMD ["make", "test"]
