"""The Python interface: run a script as a job. `import parashard as ps` exports its names."""
