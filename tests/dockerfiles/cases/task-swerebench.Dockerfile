# Adapted: the form of SWE-rebench's install configurations.
# Different here: pip installs from the project alone, without an index.
FROM devbase
WORKDIR /proj
COPY proj/ .
ENV PYTHONDONTWRITEBYTECODE=1
RUN python3 -m venv --without-pip /venv
RUN echo /proj > $(/venv/bin/python -c "import site; print(site.getsitepackages()[0])")/proj.pth
RUN /venv/bin/python -m unittest tests/test_proj.py
