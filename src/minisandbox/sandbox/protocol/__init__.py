"""What is said to a sandbox and what is believed of its answers, without any socket (sans-I/O)."""
