"""moescope-recorder: records on machines without Python what a plan says (C)."""
