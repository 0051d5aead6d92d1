"""What the coordinator knows of pods, and asks of the Kubernetes API: `cluster.launcher = "kubernetes"`."""
