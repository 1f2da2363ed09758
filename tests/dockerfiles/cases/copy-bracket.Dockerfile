FROM minibase
COPY arr[[]0].txt /x/
#: context bracket
