"""Measuring operators: named shapes, device and host time, floors, comparison of runs, pages, tuning.

`python -m mla_suite bench` and `tune` and the pytest-benchmark files all use these functions.
"""
