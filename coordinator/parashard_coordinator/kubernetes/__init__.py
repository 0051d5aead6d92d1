"""The coordinator's view of pods, and its calls of the Kubernetes API: `cluster.launcher = "kubernetes"`."""
