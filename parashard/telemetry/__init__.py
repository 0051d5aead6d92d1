"""What every process shows of itself over HTTP."""
