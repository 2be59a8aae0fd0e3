"""The rules of an expert cache and of token buffers, shared by the engine, the replay and the analyzer's simulator.

Needs only the standard library and NumPy: of the runtime, the analyzer imports only this package.
"""
