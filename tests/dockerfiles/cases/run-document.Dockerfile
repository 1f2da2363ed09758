FROM minibase
RUN <<EOF
set -e
echo one > /one
X=two
echo $X > /two
EOF
RUN cat <<"A" > /three && cat <<B > /four
$X literally
A
more
B
