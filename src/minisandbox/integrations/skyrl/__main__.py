"""Run ``python -m minisandbox.integrations.skyrl``."""

from minisandbox.integrations.skyrl import main

if __name__ == "__main__":
    main()
