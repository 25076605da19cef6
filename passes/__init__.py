"""Graph-to-graph passes: the middle floor of kvcompile."""

if __name__ != "kvcompile.passes":
    raise ImportError("import kvcompile.passes, not passes: a second copy would have other classes")
