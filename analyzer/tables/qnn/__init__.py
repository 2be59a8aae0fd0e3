"""Tables of the NPU: joins of QNN's calls, executions, objects and profile events."""
