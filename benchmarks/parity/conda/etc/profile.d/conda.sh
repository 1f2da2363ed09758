# Stands in for conda's: `conda activate NAME` is a function of the shell; all else is the program.
conda() {
    if [ "$1" = activate ]; then
        export CONDA_DEFAULT_ENV="$2" CONDA_PREFIX="/opt/miniconda3/envs/$2"
        [ "$2" != base ] || CONDA_PREFIX=/opt/miniconda3
        PATH="$CONDA_PREFIX/bin:/opt/miniconda3/bin:$(printf %s "$PATH" | sed -E 's#/opt/miniconda3(/envs/[^/:]+)?/bin:##g')"
    else
        /opt/miniconda3/bin/conda "$@"
    fi
}
