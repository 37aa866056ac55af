//! Seeds of a simulation; a failure prints the command that repeats it.

/// Calls `run` with the seed of `WEIR_SEED`, or the first `WEIR_SEEDS` seeds, else the first
/// `default`. Returns their number.
///
/// `target` is the argument of `cargo test` that selects the target of this test.
pub(crate) fn for_each(target: &str, default: u64, mut run: impl FnMut(u64)) -> u64 {
    let seeds = match (number("WEIR_SEED"), number("WEIR_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(default),
    };
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let _reporter = SeedReporter { target, seed };
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
    seed: u64,
}

impl Drop for SeedReporter<'_> {
    #[expect(clippy::print_stderr, reason = "a failing test prints the command that repeats it")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { target, seed } = self;
            // libtest names the thread after its test, except with `--test-threads 1`.
            let thread = std::thread::current();
            let test = thread.name().filter(|name| *name != "main").unwrap_or_default();
            let package = env!("CARGO_PKG_NAME");
            eprintln!("seed {seed} failed; repeat it with");
            eprintln!("    WEIR_SEED={seed} cargo test -p {package} {target} {test}");
        }
    }
}
