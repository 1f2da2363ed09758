FROM scratch
COPY --parents dir/sub/y.txt go/*.go /x/
COPY --parents dir/./sub /z/
