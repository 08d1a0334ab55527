"""The benchmark harness: ``python3 -m benchmarks --help`` from the repository root.

===================  ==========================================================================================
case.py              what a case is: an op, its inputs, the bytes it must move, the bars it has to reach
cases/               the cases themselves, one file per family; a new op adds its rows there
implementations.py   the contestants: eager, torch.compile, fastlayers by choice and forced, naive, Liger
timing.py            GPU time by summed kernels, wall time, host time, peak memory
precompile.py        torch.compile's work, done in parallel before anything is timed
startup.py           the import, and the first call of a kernel
run.py               one case after the other: check, time, write down
result_file.py       how results are written: a line for each row
environment.py       the machine, the versions and the commit that a result belongs to
report.py            tables, for the terminal and for Markdown
networks.py          the whole models: how each is built and fed, and the modes
models.py            the run over them, each model and mode in a process of its own
preload.py           what such a process finds imported
model_worker.py      what it measures
model_report.py      their tables, and which bars hold
plots.py             pictures, drawn from a result file of either kind
===================  ==========================================================================================
"""
