"""Prints the record of a room as a timeline."""
