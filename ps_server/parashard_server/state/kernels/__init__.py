"""Update rules of the optimizers on flat float32 vectors: a readable reference, and fused loops with the same bits."""
