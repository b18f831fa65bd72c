"""The exception tree, and the exit code each branch ends a command with.

GatewrightError
├── UserError        exit 2   something you wrote or pointed at: fix it and run again
│   ├── RunFileError          the run file or a --set override
│   ├── DataError             a data file, a row in it, a chat template
│   └── ModelError            a model or adapter folder, or a model that cannot be trained as asked
└── RunFailed        exit 1   a correct request that failed while it ran
    ├── CheckpointError       a checkpoint that is damaged or cannot be written
    ├── Diverged              loss or gradient stopped being a number
    ├── RankLost              another rank of the run died, hung, or cannot be reached
    ├── EndedByRank           ended because another rank failed, which has said why
    └── RouterCollapsed       the guard was told to stop the run when the router collapses
"""


class GatewrightError(Exception):
    """Base of every error we raise on purpose; its text is all a user sees (no traceback).

    The text follows one order: what is wrong, where, what was got and wanted, what to change.
    """

    exit_code: int = 1


class UserError(GatewrightError):
    """The request is wrong; nothing was started and nothing was written."""

    exit_code = 2


class RunFileError(UserError):
    """The run file, or a `--set` override of it, does not say something valid."""


class DataError(UserError):
    """A data file, one of its rows, or the chat template that should render it is unusable."""


class ModelError(UserError):
    """A model or adapter is missing, incomplete, or cannot be trained the way the run asks."""


class RunFailed(GatewrightError):
    """The request was valid, but the run could not go on."""


class CheckpointError(RunFailed):
    """A checkpoint cannot be written, or none that verifies can be read."""


class Diverged(RunFailed):
    """The loss or the gradient norm became NaN or infinite."""


class RouterCollapsed(RunFailed):
    """The guard's last action: the router is ill beyond the limits of the run file, and the run file says stop."""


class RankLost(RunFailed):
    """A collective broke or timed out: another rank died, stopped, or cannot be reached."""


class EndedByRank(RunFailed):
    """This rank ends because another one failed; that one tells why, so this has no text."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__("")
        self.rank = rank
        self.exit_code = exit_code
