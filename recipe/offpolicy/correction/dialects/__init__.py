"""Converters from the configuration keys of other frameworks to ours, as plain values, and to those of three.

A key left out has its framework's default. Options that the framework would ignore in silence, and options without an
equivalent here, raise ``SpecError`` with the framework's own key.
"""
