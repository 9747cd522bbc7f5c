"""The benchmarks, installed as `eqaccel.benchmarks`: `python -m eqaccel bench`.

Times eqaccel beside every peer that is installed, and checks the numbers of each before it is timed. A benchmark is a
row of `command.BENCHMARKS`: its options, how it runs, its table and its pictures. All of them give plain data that go
into a JSON file, from which tables and pictures can be made again.
"""
