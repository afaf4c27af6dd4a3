"""How many numbers of a quantized tensor share a scale."""

WEIGHT_BLOCK = 128
"""Rows and columns of a weight in fp8."""
FP4_BLOCK = 32
"""Columns of a weight in fp4."""
ACTIVATION_BLOCK = 128
"""Channels of an activation before a quantized linear map; the last block may be shorter."""
