"""The benchmark harness: ``python3 -m benchmarks --help`` from the repository root.

===================  ==========================================================================================
case.py              a case: an op, its inputs, the bytes that it must move, the bars that it has to reach
cases/               the cases, one file for each family; a new op adds its rows there
implementations.py   the contestants: eager, torch.compile, fastlayers with and without a forced backend, naive, Liger
timing.py            GPU time by summed kernels, wall time, host time, peak memory
precompile.py        compiles in parallel what torch.compile will need, before anything is timed
startup.py           the import, and the first call of a kernel
run.py               checks and times one case after the other, and writes the results
result_file.py       the format of a result file: one line for each row
environment.py       the machine, the versions and the commit that a result belongs to
report.py            tables, for the terminal and for Markdown
networks/            the whole models: how each is built, its inputs, and the modes
models.py            runs them, each model and mode in a process of its own
preload.py           imports the libraries once, for all these processes
model_worker.py      what such a process measures
model_report.py      their tables, and which bars hold
losses.py            losses of training with fastlayers and without
plots.py             plots of a result file of any kind
===================  ==========================================================================================
"""
