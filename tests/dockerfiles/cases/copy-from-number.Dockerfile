FROM minibase
RUN touch /zero
FROM minibase
RUN touch /one
FROM scratch
COPY --from=0 /zero /
COPY --from=1 /one /
