"""What processes say to each other: values, their bytes, and the calls that carry them."""
