"""``python -m streamrl.processes <role> --index i --run-directory DIR``: one process of a run."""

from __future__ import annotations

from streamrl.base.run_process import die_with_parent


def main() -> None:
    """Tie this process to its parent before anything heavy is imported, then do the role's work."""
    die_with_parent()
    from streamrl.supervise.child import main as run_child

    run_child()


if __name__ == "__main__":
    main()
