"""A ``torch.jit.ScriptModule`` as the patient.

Its methods are graphs that every instance of a type shares, and a method that has run is compiled for good. So a copy
is edited: its graphs get a call of an operator, which is a scripted child, registered on every instance of the type and
without effect on all but the place. The copy takes over the parameters and buffers, and the Python objects of the
module are made to stand for it.
"""
