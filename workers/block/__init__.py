"""The envs of one worker: commands carried out, rows written."""
