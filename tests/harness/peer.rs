//! Runs one script with a program of QEMU and with a link of that name to weir, and compares both.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use super::{Scratch, TestClient, WEIR, need, text};

/// Environment of the scripts: `S` is a path for the socket; `ended PID` waits for the end of a
/// process; `stop` ends the process whose PID is in the file `pid`; `about` prints an export's
/// properties as clients see them.
///
/// Excluded are known differences: the preferred block size, and `qemu:allocation-depth`, which
/// weir always offers (docs/from-qemu.md).
const PRELUDE: &str = r#"
set -u
uri="nbd+unix:///?socket=$S"
ended() { tail -s 0.01 --pid="$1" -f /dev/null; }
stop() { server=$(cat pid); kill "$server"; ended "$server"; }
about() {
    nbdinfo --json "${1:-$uri}" |
        grep -oE '"(export-name|description|is_|can_|export-size|structured|TLS|protocol|block_size_m)[^,]*'
}
read_at() { qemu-io -rf raw -c "read -P $1 $2 $3" "$uri" | grep -c '^read'; }
write_at() { qemu-io -f raw -c "write -P $1 $2 $3" -c flush "$uri" | grep -c '^wrote'; }
"#;

pub(crate) struct ScriptRun {
    code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    files: PathBuf,
    _scratch: Scratch,
}

impl ScriptRun {
    #[track_caller]
    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.files.join(name)).expect("the script has written it")
    }
}

/// Runs the script in a directory filled by `prepare`. If `ours` is true, `program` is a link to
/// weir.
fn run(program: &str, script: &str, ours: bool, prepare: &dyn Fn(&Scratch)) -> ScriptRun {
    let scratch = Scratch::new();
    let files = scratch.path("");
    prepare(&scratch);
    let programs = scratch.path("programs");
    fs::create_dir(&programs).expect("the directory can be created");
    if ours {
        symlink(WEIR, programs.join(program)).expect("the link can be created");
    }
    let variables = [format!("S={}", text(&scratch.socket("s"))), format!("TMPDIR={}", text(&files))];
    let client = TestClient::new("env").args(variables).args(["bash", "-c", &format!("{PRELUDE}{script}")]);
    let outcome =
        client.describing(if ours { "weir" } else { "QEMU" }).inside(&files).with_path(&programs).run();
    ScriptRun {
        code: outcome.code(),
        stdout: outcome.stdout(),
        stderr: outcome.stderr(),
        files,
        _scratch: scratch,
    }
}

/// Asserts that both print the same, end with the same status and leave the same `disk.raw`;
/// returns weir's run.
#[track_caller]
pub(crate) fn compare_with_qemu(program: &str, script: &str, prepare: impl Fn(&Scratch)) -> ScriptRun {
    for needed in [program, "nbdinfo", "nbdsh", "qemu-io"] {
        need(needed);
    }
    let [ours, theirs] = [true, false].map(|ours| run(program, script, ours, &prepare));
    assert_eq!(
        (ours.code, &ours.stdout),
        (theirs.code, &theirs.stdout),
        "standard error of weir:\n{}\nof QEMU:\n{}",
        ours.stderr,
        theirs.stderr
    );
    assert!(!ours.stdout.is_empty() && !ours.stderr.contains("panicked"), "{}", ours.stderr);
    let disk = Path::new("disk.raw");
    if ours.files.join(disk).exists() {
        assert!(ours.bytes("disk.raw") == theirs.bytes("disk.raw"), "the images differ");
    }
    ours
}
