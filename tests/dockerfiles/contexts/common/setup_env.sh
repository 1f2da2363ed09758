#!/bin/bash
set -eu
python3 -m venv --without-pip /opt/env
echo "PATH=/opt/env/bin:\$PATH" >> /root/.bashrc
