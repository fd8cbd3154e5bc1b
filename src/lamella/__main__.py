"""python -m lamella"""

from lamella.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
