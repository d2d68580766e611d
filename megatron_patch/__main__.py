"""`python -m megatron_patch <command>` is `dsa-upcycle <command>`."""

from megatron_patch.cli import main

if __name__ == "__main__":
    main()
