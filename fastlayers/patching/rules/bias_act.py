"""A linear layer with its activation, whose kernel adds the bias, and the linear layer after them."""

from __future__ import annotations

from fastlayers.patching.rules.base import GraphRule
from fastlayers.patching.rules.matchers import find_linear_act, find_mlp

__all__ = ["LINEAR_ACT", "MLP"]


MLP = GraphRule("mlp", "linear(dropout(act(linear(x)))), under autocast one node of autograd", find_mlp)
LINEAR_ACT = GraphRule("linear_act", "act(linear(x)), the bias added by the activation's kernel", find_linear_act)
