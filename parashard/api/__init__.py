"""The Python interface: a script as a job. `import parashard as ps` has its names."""
