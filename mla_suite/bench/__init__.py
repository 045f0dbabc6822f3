"""Measuring operators: named shapes, device and host time, floors, tuning.

`timer` gives every time; the programs and pytest-benchmark files of benchmarks/, `bench` and `tune` are built on it.
"""
