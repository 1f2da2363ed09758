FROM minibase
ENV abc=hello
ENV abc=bye def=$abc
ENV ghi=$abc
RUN echo $abc $def $ghi > /out
