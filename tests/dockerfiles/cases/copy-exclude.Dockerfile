FROM scratch
COPY --exclude=*.txt --exclude=dir/sub . /x/
#: differs /x/alink /x/alinkfile /x/dir /x/dirlink a COPY by itself follows links
