from minibase as First
run touch /a
env A=1
from first
copy --from=FIRST /a /b
