"""Supplier due diligence: a natural stand-in for the ten-node application of arXiv:2609.00643, Tables 5 and 6.

The original application is not public. This one was built so that its five revisions give suffix sizes that sum to 39 and
affected sizes that sum to 22; what is tested is that tracked reads, not declarations, recover those sets.
"""
