"""What each verb of the command line does: `main(arguments) -> exit code`, one module a verb."""
