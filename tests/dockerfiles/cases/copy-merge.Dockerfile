FROM minibase
RUN mkdir -p /m/sub && chmod 700 /m/sub && touch /m/sub/old /m/stays
COPY dir /m
