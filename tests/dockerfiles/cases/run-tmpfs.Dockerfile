FROM minibase
RUN --mount=type=tmpfs,target=/scratch touch /scratch/x && ls /scratch > /out
