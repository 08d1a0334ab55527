"""CUDA graphs of a model's forward and backward, one for each signature of a call."""

from fastlayers.graphs.api import graph_model, graph_report, ungraph_model

__all__ = ["graph_model", "graph_report", "ungraph_model"]
