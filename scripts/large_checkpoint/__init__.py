"""A pair that serves a checkpoint with less memory than its weights take: the same tokens, how fast, how much is read.

:mod:`.control_group` limits the memory of a process where the system allows that.
"""
