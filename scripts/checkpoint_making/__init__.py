"""Makes checkpoints in the official format: random ones of any config, and quantized ones of plain checkpoints."""
