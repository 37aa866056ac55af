//! Log lines before a panic that ends the process at once, as in release builds.

use std::{env, fs, panic, process::Command};

use console::logging;
use settings::{LogFormat, LogSettings};

// Environment variable with the log's path. If set, the test is the child process that panics.
const LOG: &str = "WEIR_TEST_PANICKING_LOG";
const LINES: usize = 3000;

#[test]
fn lines_before_a_panic_are_written() {
    if let Some(path) = env::var_os(LOG) {
        let filter = "info".to_owned();
        logging::start(&LogSettings { filter, format: LogFormat::Text, file: Some(path.into()) })
            .expect("the log is opened");
        let panicked = panic::catch_unwind(|| {
            (0..LINES).for_each(|line| tracing::info!(line, "logged"));
            panic!("as tested");
        });
        assert!(panicked.is_err());
        std::process::abort();
    }
    let path = env::temp_dir().join(format!("weir-panicking-{}.log", std::process::id()));
    let test = env::current_exe().expect("a program");
    let outcome =
        Command::new(test).arg("lines_before_a_panic_are_written").env(LOG, &path).output().expect("it runs");
    let log = fs::read_to_string(&path).unwrap_or_default();
    let _ = fs::remove_file(&path);
    assert!(!outcome.status.success());
    assert_eq!(log.matches("logged").count(), LINES, "{}", String::from_utf8_lossy(&outcome.stderr));
}
