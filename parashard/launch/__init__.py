"""The local launcher: run directories, the processes of a run, and its end."""
