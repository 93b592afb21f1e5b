"""Compiled kernels. Only `ops` imports them, each beside the plain torch it must agree with."""
