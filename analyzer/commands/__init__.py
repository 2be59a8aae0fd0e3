"""The verbs of python -m analyzer."""
