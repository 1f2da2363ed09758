"""Implement the command line, with a module for each noun that parses arguments and prints results."""
