# escape=`
FROM minibase
RUN echo a `
  && echo C:\x > /out
ENV P=c:\dir
COPY a.txt `
  /x/
