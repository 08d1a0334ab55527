"""How a forward is read: the trace of it, and its source compiled again."""
