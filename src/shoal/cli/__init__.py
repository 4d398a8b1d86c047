"""The command line, `shoal COMMAND`.

Commands: `run`, `profile`, `devices`, `page`, `report`, `export`, `rerun`, `history`, `trial`, `policy`, `study`,
`resume`, `status`, `trials`, `best`, `simulate`.
"""
