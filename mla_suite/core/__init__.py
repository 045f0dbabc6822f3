"""Floor 1: records and rules that know no operator: arch, layouts, checks, library, tuning, dispatch."""
