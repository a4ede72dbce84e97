"""Drop-in replacements for other libraries' vector envs, on top of the executor; import the one you need."""
