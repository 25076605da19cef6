"""Specs to kernels: the ground floor of kvcompile."""

if __name__ != "kvcompile.codegen":
    raise ImportError(
        "import kvcompile.codegen, not codegen: a second copy would have other classes"
    )
