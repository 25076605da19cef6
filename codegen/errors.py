"""Named errors of the ground floor, and the base class of every error of the project."""


class KvcompileError(RuntimeError):
    """Base of every error that kvcompile raises on purpose."""


class CompilerNotFoundError(KvcompileError):
    """No C++ compiler can be run."""


class KernelCompilationError(KvcompileError):
    """A generated kernel does not compile or cannot be loaded; carries the compiler's words."""


class UnsupportedKernelError(KvcompileError):
    """No printer can print this specification; the message says which field and why."""
