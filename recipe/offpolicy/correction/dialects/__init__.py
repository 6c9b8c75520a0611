"""Converters from the configuration keys of SkyRL, TRL and verl to ours, as plain values.

A key left out has the default of its framework. Whatever a framework would ignore in silence, and whatever cannot be
said in ours, is a ``SpecError`` that names their key.
"""
