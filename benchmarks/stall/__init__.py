"""What a checkpoint costs training, by method: see ``benchmarks/README.md``."""
