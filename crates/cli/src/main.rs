//! The `everbus` binary.
//!
//! Exit codes:
//!
//! | code | meaning |
//! |---|---|
//! | 0 | it worked |
//! | 1 | the operation failed, or `check` or `audit verify` found problems |
//! | 2 | the command line, the configuration file, or the data given with it, is wrong |
//! | 3 | there is no such file, event, dead letter or group |
//! | 4 | refused for now: the server cannot be reached, the file is in use or locked, the disk is full, or nothing can be written |
//! | 130 | interrupted with Ctrl-C before the work was done |

use std::process::ExitCode;

fn main() -> ExitCode {
    everbus_cli::main()
}
