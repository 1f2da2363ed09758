FROM scratch
COPY . /all/
COPY src /src/
#: context ignored
