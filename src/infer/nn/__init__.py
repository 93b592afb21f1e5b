"""The arithmetic in plain torch: attention, norms, RoPE, linear layers, quantized weights; and sampling."""
