FROM minibase AS one
ONBUILD ENV A=1
ONBUILD COPY a.txt /from-trigger
ONBUILD RUN echo $A > /triggered
RUN touch /first
FROM one
RUN cat /triggered > /after
