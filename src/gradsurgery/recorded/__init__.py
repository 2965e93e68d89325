"""Operators in a graph that was recorded from an operated model, such as the module of a ``torch.export`` program.

A recorder keeps single ops. So an operator is there as the ops of its formula (``operators/formula.py``), and is found
again by them.
"""
