//! The `weir` command; all of it is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    weir::main()
}
