"""The main program of each process of a run: ``python -m streamrl.launch <role> --index i --run-directory DIR``. The
supervisor starts it, or a daemon of a cluster's host."""

from __future__ import annotations

from streamrl.base.run_process import die_with_parent


def main() -> None:
    """Tie this process to its parent before anything heavy is imported, then do the work of its role."""
    die_with_parent()
    from streamrl.launch.roles import role_main
    from streamrl.processes.run_role import leave, load_setup, parse_arguments, run_role

    plan, directory, sockets, resumes = parse_arguments()

    def work() -> None:
        setup = load_setup(plan, directory, sockets, resumes=resumes)
        run_role(setup, role_main(plan.role))

    leave(plan, directory, work)


if __name__ == "__main__":
    main()
