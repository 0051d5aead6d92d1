"""`parashard doctor`: what is wrong with machines and networks, before or while a job runs on them.

The shell measures (`machine`, `links`, `hosts`, `service`); `findings` judges what was measured, and is pure.
"""
