FROM minibase
RUN useradd -u 1234 joe && groupadd -g 2345 crew
COPY --chown=joe a.txt /n/
COPY --chown=joe:crew dir /g/
COPY --chown=55:66 a.txt /i
COPY --chown=1234:crew b.txt /m
ARG O=joe:joe
COPY --chown=$O c.md /v
