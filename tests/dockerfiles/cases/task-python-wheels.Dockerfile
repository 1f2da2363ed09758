# Adapted: the form of a Python image that builds in one stage.
# Different here: the wheel is a zip of the project.
FROM devbase AS builder
WORKDIR /build
COPY proj .
RUN mkdir /wheels && cp -r proj /wheels/proj && printf 'proj==1.0\n' > /wheels/index
FROM devbase
RUN useradd --create-home --uid 1000 app
COPY --from=builder --chown=app:app /wheels/proj /srv/repo/app/lib/proj
COPY --from=builder /wheels/index /srv/repo/app/
USER app
ENV PYTHONPATH=/srv/repo/app/lib PYTHONDONTWRITEBYTECODE=1
RUN python3 -c "import proj; assert proj.double(3) == 6"
WORKDIR /srv/repo/app
