FROM minibase
WORKDIR /a
WORKDIR b
RUN pwd > out
ENV D=deep/er
WORKDIR $D
RUN pwd > out
WORKDIR ../up
RUN touch here
WORKDIR /etc
