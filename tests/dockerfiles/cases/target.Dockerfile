FROM minibase AS one
RUN touch /one
FROM minibase AS two
RUN touch /two
FROM one AS three
RUN false
#: target one
