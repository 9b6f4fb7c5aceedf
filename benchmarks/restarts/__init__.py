"""Parts of ``benchmarks/recovery.py``: one job of several ranks that meets faults, by us and by NVIDIA's package."""
