"""What a job computes and where: variables, partitions and their placement, steps, optimizers' settings. All pure."""
