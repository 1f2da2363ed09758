FROM minibase
COPY ["sp ace.txt", "a.txt", "/with blank/"]
