FROM devbase
RUN python3 -c "import os; open('/x', 'w'); os.setxattr('/x', 'user.note', b'v')"
RUN cp --preserve=xattr /x /y
