FROM minibase AS unused
RUN false
FROM minibase
RUN touch /x
