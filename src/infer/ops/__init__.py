"""The arithmetic: attention, norm, rope and linear in plain torch."""
