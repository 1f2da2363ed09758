FROM minibase AS a
RUN echo a > /a
FROM a AS b
RUN echo b > /b
FROM a AS c
RUN echo c > /c
FROM b
COPY --from=c /c /c
RUN cat /a /b /c > /all
