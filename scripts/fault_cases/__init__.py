"""scripts/faults.py: faults that PD servers had elsewhere, staged here, and the matrix of what each check notices."""
