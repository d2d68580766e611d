"""Bad inputs by kind, as a user would give them to the commands; `tests/test_bad_input.py` runs them all."""
