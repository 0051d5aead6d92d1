"""Code generated from `protos/*.proto` by `make protos`. Nothing here is written by hand."""
