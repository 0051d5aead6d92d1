"""The text of a job file with only what is required, for tests that need some job."""

SMALL_JOB = """
[job]
name = "small"
epochs = 2
batch_size = 8

[data]
source = "synthetic"

[model]
kind = "softmax"

[optimizer]
kind = "sgd"
learning_rate = 0.1
"""
