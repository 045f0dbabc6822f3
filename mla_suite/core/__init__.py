"""Records and rules that know no operator: registration, checks, tuned tables, dispatch, explain."""
