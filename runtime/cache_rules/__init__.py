"""The rules of an expert cache and of token buffers. The engine, the replay and the analyzer's simulator share them.

Needs the standard library and NumPy alone: the analyzer imports this wing of the runtime, and nothing else of it.
"""
