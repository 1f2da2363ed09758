FROM minibase
COPY a.txt b.txt c.md /x/
COPY dir c.md /y/
