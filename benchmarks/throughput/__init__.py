"""How fast checkpoints are loaded and written, by method: see ``benchmarks/README.md``."""
