FROM minibase AS a
RUN mkdir /o && touch /o/1.whl /o/2.whl /o/3.txt && ln -s /o /ol
FROM scratch
COPY --from=a /o/*.whl /w/
COPY --from=a /ol/3.txt /t
