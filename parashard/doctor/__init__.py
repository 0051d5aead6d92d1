"""`parashard doctor`: finds problems of machines and networks, before or while a job runs on them.

The shell measures (`machine`, `links`, `hosts`, `service`); `findings` judges the measurements, and is pure.
"""
