"""Layer 1: records and rules that know no operator: arch, kv_formats, checks, library, tuning, dispatch."""
