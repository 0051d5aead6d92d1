"""The races of parashard against its peers, and against itself; `ballast.toml` is the job that most of them run."""
