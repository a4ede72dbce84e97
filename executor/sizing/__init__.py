"""Choose numbers of envs and workers: probe one env, apply a rule, and confirm it by running at most four settings.

settings       the values: numbers of envs and workers, the mode of stepping, what is wanted, what was measured
driving        start the executor of a setting, and run it like a training loop
probe          an executor of one env measures it
rule           the settings worth running, and those that do not fit the machine
confirming     run these settings in turns, and take the smallest of the fastest
reasons        sentences on the bottleneck
recommending   all of this in one call, and "auto"
"""
