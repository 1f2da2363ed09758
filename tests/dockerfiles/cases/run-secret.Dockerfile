FROM minibase
RUN --mount=type=secret,id=token cat /run/secrets/token | wc -c > /out
RUN --mount=type=secret,id=token,target=/etc/token,mode=0400 stat -c %a /etc/token > /mode
RUN test ! -s /run/secrets/token
#: secret token=sesame
