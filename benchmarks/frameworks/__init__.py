"""The same MLP in every framework, alone and trained by parashard; `benchmarks.frameworks_accuracy` compares them."""
