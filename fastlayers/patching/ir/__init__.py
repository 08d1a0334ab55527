"""The small graph that rules read: operations, the view of a graph, spellings, decompositions, fingerprints."""
