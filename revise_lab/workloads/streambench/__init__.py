"""StreamBench (arXiv:2604.23283) rebuilt: three tasks that a user revises while an agent works on them.

The published tasks, tools and texts are not public; what is taken from the paper is the structure (number of steps, their
classes, the first step that cannot simply be undone, the moment of the revision). All wording is ours.
"""
