"""The shell around the core: the resolved job, the main loop, stored decisions, the final report."""
