"""Parts of ``benchmarks/checkpoint_efficiency.py``: training that saves as often as storage can just take it."""
