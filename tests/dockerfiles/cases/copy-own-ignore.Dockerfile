FROM scratch
COPY . /all/
#: context own_ignore
#: ignore two
