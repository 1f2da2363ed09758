FROM minibase
RUN --mount=type=bind,source=dir,target=/mnt/dir cp /mnt/dir/x.txt /out
RUN --mount=type=bind,target=/ctx ls /ctx/dir > /list
