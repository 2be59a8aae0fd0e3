"""Tables of the NPU: QNN's calls, executions, objects and profile events, joined."""
