"""Update rules of the optimizers on flat float32 vectors, each written once, and the loops that run them."""
