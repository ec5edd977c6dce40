"""How a call is planned, by rule, by measured times, or by times taken on the spot."""
