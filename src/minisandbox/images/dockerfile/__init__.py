"""Parse Dockerfiles, evaluate them into stages of build steps, and run the steps without a container engine."""
