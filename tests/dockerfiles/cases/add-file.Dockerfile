FROM minibase
ADD a.txt /x/
ADD dir /d/
ADD ["sp ace.txt", "/y"]
