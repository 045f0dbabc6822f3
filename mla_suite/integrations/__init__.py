"""Layer 5: other projects' models and interfaces on top of ours; each module imports its project, this one none."""
