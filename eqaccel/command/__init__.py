"""What `python -m eqaccel` answers itself: a module for each question that takes more than a few lines.

Takes options of the command line; gives text. Knows targets, families and the runtime; must not know the name of a
family, nor torch, which takes seconds to import.
"""
