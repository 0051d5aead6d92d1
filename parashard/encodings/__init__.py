"""Wire encodings of gradients: compression of pushes, with error feedback for the lossy ones.

`encoding` is the value that a job file names, `codec` converts slices and rows of tables to bytes and back, `feedback`
keeps the residues, and `compiled` has the arithmetic.
"""
