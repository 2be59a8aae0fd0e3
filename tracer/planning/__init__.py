"""The planner's end of the pipe to a recorder: what to probe in the files that the target opens."""
