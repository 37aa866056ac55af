//! The `weir` command. All of it is in the library of the same name, where tests and fuzz targets
//! reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    weir::main()
}
