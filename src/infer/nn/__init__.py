"""The arithmetic: attention, norm, rope and linear in plain torch, and the choice of compiled kernels."""
