"""Tests; a package, because verl's wheel installs another one of this name."""
