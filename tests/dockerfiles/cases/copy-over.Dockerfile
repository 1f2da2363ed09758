FROM minibase
RUN echo old > /f && chmod 600 /f && mkdir -m 711 /d && echo old > /d/x.txt && ln -s /f /l
COPY a.txt /f
COPY dir /d
COPY b.txt /l
#: differs /f /l docker replaces what a link leads to, as here; buildah replaces the link
