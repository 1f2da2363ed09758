FROM minibase
RUN echo "$http_proxy" > /out
#: arg http_proxy=http://proxy.example.org:3128
