"""The envs of one worker: carry out commands and write rows."""
