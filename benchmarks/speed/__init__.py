"""What the package costs, side by side with its peers: ``python -m benchmarks.speed``."""
