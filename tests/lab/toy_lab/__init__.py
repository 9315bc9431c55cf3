"""Experiments for the tests of the lab, found by dotted path as those of another package would be."""
