"""Wire encodings of gradients: compression of pushes, with error feedback for the lossy ones.

`encoding` is the value that a job file names, `codec` converts a slice to bytes and back, `row_codec` rows of a table,
`feedback` keeps the residues; `reference` is the readable arithmetic and `compiled` the same by Numba.
"""
