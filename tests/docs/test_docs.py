"""The pages of the API reference: that they build, whole and without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastlayers import functional, modules
from tests import ROOT

NEEDED = ("mkdocs", "material", "mkdocstrings_handlers", "griffe", "latex2mathml")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="the extra docs is not installed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` builds it: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def article(page: Path) -> str:
    return page.read_text().partition("<article")[2].partition("</article>")[0]


def test_every_op_has_a_page_with_its_formula_and_what_it_keeps(site):
    for name in functional.__all__:
        text = article(site / "ops" / f"{name}.html")
        assert f'id="fastlayers.functional.{name}"' in text
        assert "<math" in text, name
        assert "Keeps:" in text or "what is kept" in text or name == "channel_layer_norm", name


def test_every_module_is_on_a_page(site):
    pages = "".join(article(page) for page in (site / "ops").glob("*.html"))
    for name in set(modules.__all__) - {"DROP_IN"}:
        assert f'id="fastlayers.modules.{name}"' in pages, name


def test_plots_are_those_that_were_committed(site):
    text = article(site / "ops" / "softmax.html")
    assert {"../plots/results-softmax-sweep.png", "../plots/results-softmax-bars.png"} <= set(
        re.findall(r'src="([^"]+)"', text)
    )
    assert (site / "plots" / "results-softmax-sweep.png").stat().st_size > 10_000


def test_pages_fetch_nothing(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'(?:src|<link[^>]* href)="https?:', text), page


def test_pages_have_no_sphinx_roles(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r":(?:func|class|mod|meth):|\.\. math::", page.read_text()), page


def test_unknown_latex_is_an_error():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import rst
    finally:
        sys.path.remove(str(ROOT / "docs"))
    with pytest.raises(ValueError, match="nonsense"):
        rst.mathml(r"\nonsense{x}")
    assert (
        rst.markdown("see :func:`mul`, :class:`torch.Tensor`", {"mul": "f.mul"}) == "see [`mul`][f.mul], `torch.Tensor`"
    )
