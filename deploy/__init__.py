"""What runs parashard elsewhere than on one machine, and what watches it."""
