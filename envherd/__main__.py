"""`python -m envherd`: the command `envherd`, of this interpreter."""

from envherd.executor.cli import main

if __name__ == "__main__":
    main()
