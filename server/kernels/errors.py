"""The error of a process without kernels, apart from what imports torch: the launchers report it."""


class KernelsUnavailable(RuntimeError):
    """There are no kernels that this process can use; the text says why, and what to do."""
