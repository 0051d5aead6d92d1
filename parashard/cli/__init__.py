"""The command line. Each file has one group of commands."""
