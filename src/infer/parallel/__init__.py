"""Tensor parallel: a model in several processes, each of which has a part of it. One leads, the others follow its rows."""
