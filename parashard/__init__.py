"""parashard: a parameter server for training on machines that come and go."""

__version__ = "0.1.0"
