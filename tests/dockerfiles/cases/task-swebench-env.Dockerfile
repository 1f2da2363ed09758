# Adapted: the form of SWE-bench's environment images.
# Different here: the base is the Debian base, conda a virtual environment.
FROM devbase
COPY ./setup_env.sh /root/
RUN sed -i -e 's/\r$//' /root/setup_env.sh
RUN chmod +x /root/setup_env.sh
RUN /bin/bash -c "source ~/.bashrc && /root/setup_env.sh"
WORKDIR /testbed/
RUN echo "source /opt/env/bin/activate" > /root/.bashrc
