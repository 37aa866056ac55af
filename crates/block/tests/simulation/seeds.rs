//! Seeds of a simulation; a failure prints the command that repeats it.

/// Calls `run` with the seed of `WEIR_SEED`, or the first `WEIR_SEEDS` seeds, else the first
/// `default`. Returns their number.
///
/// `target` and `test` are arguments of `cargo test` that select this test.
pub(crate) fn for_each(target: &str, test: &str, default: u64, mut run: impl FnMut(u64)) -> u64 {
    let seeds = match (number("WEIR_SEED"), number("WEIR_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(default),
    };
    // libtest names the thread after its test, except the only one of `--test-threads 1`.
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("main");
    assert!(name == "main" || name.contains(test), "the printed command would not select {name}");
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let _reporter = SeedReporter { target, test, seed };
        run(seed);
    }
    count
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: is not a whole number")))
}

/// Prints the command that repeats a failure, when a panic unwinds past it.
struct SeedReporter<'a> {
    target: &'a str,
    test: &'a str,
    seed: u64,
}

impl Drop for SeedReporter<'_> {
    #[expect(clippy::print_stderr, reason = "a failing test prints the command that repeats it")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { target, test, seed } = self;
            let package = env!("CARGO_PKG_NAME");
            eprintln!("seed {seed} failed; repeat it with");
            eprintln!("    WEIR_SEED={seed} cargo test -p {package} {target} {test}");
        }
    }
}
