"""What is printed fits a terminal of 80 and of 120 columns, and a pipe; no name is broken and nothing is left out."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from fastlayers import cli
from fastlayers.graphs.report import GraphReport, GraphRow
from fastlayers.patching import Reason
from fastlayers.patching.measure.profile import Measurement, ProfileReport
from fastlayers.patching.measure.verify import Comparison, VerifyReport
from fastlayers.patching.report import PatchReport, RegionRow, Row, SignatureRow
from fastlayers.tables import Table
from tests import ROOT

WIDTHS = (80, 120)
#: Of a console in which nothing has to wrap.
ENOUGH = 10_000

MODULES = (
    Row("", "DigitsResNet", None, reason=Reason.NOTHING_TO_FUSE),
    *(
        Row(
            f"blocks.{i}", "BasicBlock", "FusedBasicBlock",
            (("conv_batch_norm_act", 1), ("conv_batch_norm_add_act", 1)), bytes_saved=2**20,
        )
        for i in range(3)
    ),
    Row(
        "encoder.layer.0.attention.self", "BertSelfAttention", "FusedBertSelfAttentionWithoutAMask", (("softmax", 2),),
        left=((Reason.FINITE_FILL, "masked_fill fills with -1000000000.0"),), bytes_saved=3 * 2**30,
    ),
    Row("encoder.pooler", "ModernBertPooler", reason=Reason.CHANGES_STATE, detail="assigns self.the_hidden_states"),
)  # fmt: skip
RAN = RegionRow(
    "BasicBlock",
    (SignatureRow("16x64x56x56 bfloat16; training", 1200, (140, 92), (3 * 2**30, 2**30), ("fused_add_relu",)),),
    ((Reason.SEEN_ONCE, "3 signatures"),),
)
DIFFERING = tuple(
    Comparison(f"grad of encoder.layer.{i}.attention.output.LayerNorm.weight", 1.2345e-5, 1e-6) for i in range(20)
)
STEP = Measurement(10.0, 0.1, {"norm": 1.0, "elementwise": 20.5}, 1200, 2**32)
REPORTS = {
    "patch": PatchReport(MODULES, "DigitsResNet", unmatched=("nowhere.*",)),
    "after calls": PatchReport(tuple(replace(row, region=RAN) for row in MODULES), "DigitsResNet"),
    "plan with details": PatchReport(
        tuple(Row(row.fqn, row.was, row.became, row.fused, row.reason, row.detail) for row in MODULES), details=True
    ),
    "nothing to patch": PatchReport(MODULES[:1], "DigitsResNet"),
    "verify, different": VerifyReport(DIFFERING, 112, True, "encoder.layer.0.attention.output.LayerNorm"),
    "verify, equal": VerifyReport((Comparison("output", 0.0, 1e-6),), 112, False),
    "profile": ProfileReport(STEP, STEP, "DigitsResNet", 12, True, "NVIDIA H100 80GB HBM3, driver 580", True),
    "graph": GraphReport(
        (
            GraphRow("encoder.layers.0", "TransformerLayer", "16x1024x768 bfloat16; training, autocast bfloat16",
                     "captured", 2, 12345, 2**31, ""),
            GraphRow("encoder.layers.0.attention.query_projection", "LinearWithAdapter", "16x1024x768 bfloat16; eval",
                     "uncaptured", 0, 0, 0, "its forward draws random numbers from a generator of its own"),
        ),
        "Encoder",
    ),
}  # fmt: skip


def plain(report, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    return str(report)


def in_rich(report, width, monkeypatch):
    console = Console(file=io.StringIO(), width=width)
    console.print(report)
    return console.file.getvalue()


def check(text, unwrapped, width):
    """No line is longer; and the same words, which may be in another order, are there."""
    assert max(map(len, text.splitlines())) <= width
    assert sorted(text.split()) == sorted(unwrapped.split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("printed", [plain, in_rich])
def test_reports_fit_and_break_no_word(printed, name, width, monkeypatch):
    report = REPORTS[name]
    check(printed(report, width, monkeypatch), printed(report, ENOUGH, monkeypatch), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_print_and_rich_agree(width, monkeypatch):
    for report in REPORTS.values():
        assert plain(report, width, monkeypatch) == in_rich(report, width, monkeypatch).rstrip("\n")


@pytest.mark.parametrize("width", WIDTHS)
def test_info_fits(width, monkeypatch):
    contents = f"CPU kernels and CUDA kernels for {', '.join(f'sm_{arch}' for arch in range(80, 121, 4))}"
    built = [("kernels of csrc", "/opt/venv/lib/python3.11/site-packages/_C.so"), ("contains", contents)]
    monkeypatch.setattr(cli, "_built", lambda: built)
    monkeypatch.setattr(cli.console, "width", ENOUGH)
    unwrapped = CliRunner().invoke(cli.main, ["info"]).output
    monkeypatch.setattr(cli.console, "width", width)
    check(CliRunner().invoke(cli.main, ["info"]).output, unwrapped, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["cpu", "cpu_models", "fine_tuning", "losses", "models", "parallel"])
def test_tables_of_benchmarks_fit(name, width, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks.__main__ import renderer

    results = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    texts = {}
    for each in (width, ENOUGH):
        console = Console(file=io.StringIO(), width=each)
        renderer(results).print_tables(results, console)
        texts[each] = console.file.getvalue()
    check(texts[width], texts[ENOUGH], width)


def test_any_table_fits():
    draw = random.Random(0)
    for width in range(40, 160):

        def cell(longest=width - 2):
            return " ".join("x" * min(longest, int(draw.expovariate(0.15))) for _ in range(draw.randint(0, 6)))

        columns = draw.randint(1, 8)
        header, *rows = [[cell() for _ in range(columns)] for _ in range(draw.randint(2, 6))]
        table = Table(header, rows, cell(), [cell()], right=header[::2])
        check("\n".join(text for text, _ in table.lines(width)), " ".join(map(" ".join, (header, *rows))) + " "
              + table.title + " " + table.footer[0], width)  # fmt: skip


def test_a_word_that_is_longer_than_a_line_stays_whole(monkeypatch):
    path = "/opt/" + "a_long_folder/" * 8 + "_C.so"
    table = Table(("", ""), [("kernels of csrc", path), ("contains", "CPU kernels " * 8)])
    assert path in plain(table, 80, monkeypatch).split()
    assert path in in_rich(table, 80, monkeypatch).replace("\n", "")


def test_columns_that_do_not_fit_are_below_the_others(monkeypatch):
    table = Table(("module", "was", "memory", "why"), [("a" * 40, "b" * 20, "1", "c d"), ("a", "b", "22", "")],
                  right=("memory",))  # fmt: skip
    assert plain(table, 72, monkeypatch).splitlines() == [
        f"{'module':40}  {'was':20}  memory",
        "  why",
        f"{'a' * 40}  {'b' * 20}       1",
        "  c d",
        f"{'a':40}  {'b':20}      22",
    ]


PROGRAM = "from tests import test_tables; print(test_tables.REPORTS['patch']); test_tables.cli.main(['info'])"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "in_terminal"), [(80, True), (120, False)])
def test_the_width_is_that_of_the_terminal_and_120_in_a_pipe(width, in_terminal):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    stdout = theirs if in_terminal else subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=stdout, env=environment) as process:
        os.close(theirs)
        printed = b""
        with open(ours, "rb", buffering=0) as terminal:
            try:
                while piece := (terminal if in_terminal else process.stdout).read(4096):
                    printed += piece
            except OSError:  # Linux: the other side is closed.
                assert in_terminal
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode()).splitlines()
    assert width - 20 < max(map(len, lines)) <= width
    assert {"conv_batch_norm_act,", "conv_batch_norm_add_act"} <= {*" ".join(lines).split()}
