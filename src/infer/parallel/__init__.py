"""Tensor parallel: several processes have a part of a model each. One leads, the others follow its rows."""
