"""`python -m packfp8` is the command `packfp8`."""

from packfp8.cli import main

if __name__ == "__main__":
    main()
