FROM minibase AS a
RUN mkdir /o && echo a > /o/a
FROM minibase
RUN --mount=type=bind,from=a,source=/o,target=/mnt/o cp /mnt/o/a /out
