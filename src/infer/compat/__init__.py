"""Interfaces of other projects, over the models of this one."""
