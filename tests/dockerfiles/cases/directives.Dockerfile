# syntax=docker/dockerfile:1
# check=skip=all
# a comment
FROM minibase
RUN touch /x
