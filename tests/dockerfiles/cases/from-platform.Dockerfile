FROM --platform=$BUILDPLATFORM minibase
RUN touch /x
