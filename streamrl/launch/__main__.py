"""``python -m streamrl.launch <role> --index i --run-directory DIR``: one process of a run."""

from __future__ import annotations

from streamrl.base.run_process import die_with_parent


def main() -> None:
    """Tie this process to its parent before anything heavy is imported, then do the role's work."""
    die_with_parent()
    from streamrl.launch.roles import role_main
    from streamrl.processes.child import leave, load_context, parse_arguments, run_role

    plan, directory, sockets, resumes = parse_arguments()
    leave(
        plan, directory, lambda: run_role(load_context(plan, directory, sockets, resumes=resumes), role_main(plan.role))
    )


if __name__ == "__main__":
    main()
