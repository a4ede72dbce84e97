"""Choose numbers of envs and workers: probe one env, apply a rule, and confirm it by running at most four settings.

rule           values (settings, what is wanted, what was measured), the settings worth running, sentences on the choice
probe          run an executor of a setting like a training loop; one env is measured so
confirming     run these settings in turns, and take the smallest of the fastest
recommending   all of this in one call, and "auto"
"""
