//! The tour as a reader takes it: typed into an interactive shell on a terminal.
//!
//! `documents.rs` runs the same commands from a script without a terminal, where no progress is
//! drawn and no job is in the background of a terminal.

use std::{fs, path::Path};

use crate::harness::{Scratch, TestClient, WEIR, need, text};

/// A shell that leads the session of a pseudo-terminal. `enter` types lines and waits until all of
/// them have run; `output` is the complete output of the terminal.
const SHELL: &str = r##"
import fcntl, os, pty, re, select, struct, sys, termios, time

deadline = time.monotonic() + 280
output = ""
# Without brackets around pasted text.
open("inputrc", "w").write("set enable-bracketed-paste off\nset horizontal-scroll-mode off\n")
environment = dict(os.environ, PS1="", PS2="", TERM="xterm-256color", INPUTRC=os.path.abspath("inputrc"))
shell, terminal = pty.fork()
if shell == 0:
    os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))

def wait_for(pattern):
    global output
    begin = len(output)
    while not re.search(pattern, output[begin:]):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            sys.exit(f"{pattern!r} was not shown; the output was:\n{output}")
        try:
            output += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:
            sys.exit(f"the shell has ended; the output was:\n{output}")

def press(keys):
    os.write(terminal, keys.encode())

entered = 0
def enter(lines):
    global entered
    entered += 1
    # The terminal echoes the command with its quotes, so the search finds the output alone.
    press(f"{lines}\necho 'all of '{entered}' has run'\n")
    wait_for(f"all of {entered} has run")

def ready(log):
    enter(f"until grep -q ' ready ' {log}; do sleep 0.1; done")

def expect(condition, message):
    if not condition:
        sys.exit(f"{message}; the output was:\n{output}")
"##;

fn on_a_terminal(scratch: &Scratch, script: &str) {
    need("bash");
    let control = format!("unix:{}", text(&scratch.socket("qmp")));
    TestClient::new("/usr/bin/python3")
        .args(["-c", &format!("{SHELL}\n{script}")])
        .inside(scratch.path("").as_path())
        .env("WEIR_QMP", control)
        .with_path(Path::new(WEIR).parent().expect("it lies in a directory"))
        .succeeds();
}

/// Shell blocks of a document between two headings.
fn blocks(document: &str, from: &str, to: &str) -> Vec<String> {
    let part = document.split_once(from).expect("the heading is there").1;
    let part = part.split_once(to).expect("the heading is there").0;
    let code = part.split("```sh\n").skip(1);
    code.map(|rest| rest.split("```").next().expect("a part").trim_end().to_owned()).collect()
}

#[test]
fn readme_example_of_two_disks_with_one_limit() {
    let scratch = Scratch::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = fs::read_to_string(root.join("README.md")).expect("it is a text");
    let blocks = blocks(&readme, "### Two disks, one limit", "### Before you choose");
    assert!(blocks.len() >= 4 && blocks[0].contains("weir serve"), "{blocks:#?}");
    let mut script = String::new();
    for (number, block) in blocks.iter().enumerate() {
        script += &format!("enter({})\n", serde_json::to_string(block).expect("a text"));
        if number == 0 {
            script += "ready('weir.log')\n";
        }
    }
    script += r#"
expect("gold" in output and "HELD BY" in output, "the status was not shown")
# Log lines, bars and messages would overwrite the reader's command line.
for wrong in [" INFO ", " WARN ", "\u2588", "\x1b[2K", "no such job", "No such process", "weir: "]:
    expect(wrong not in output, f"{wrong!r} was shown")
enter("jobs; cat vm1.txt")
expect("Running" not in output.split("jobs; cat")[-1], "something still runs")
expect("read: " in output, "the first client has not written its results")
"#;
    on_a_terminal(&scratch, &script);
}

#[test]
fn background_job_draws_only_in_the_foreground() {
    let scratch = Scratch::new();
    let script = r#"
enter("weir serve memory:16M --nbd unix:n --iops-total 1000 2> log &")
ready("log")
enter("weir bench --random --runtime 1h 'nbd+unix:///?socket=n' &")
# A second load, long enough that its bar would have been drawn many times.
enter("weir bench --random --runtime 3s 'nbd+unix:///?socket=n' > other 2>&1")
expect("IOPS" not in output, "a job in the background has drawn")
press("fg\n")
wait_for("IOPS .*\u2588")
press("\x03")
wait_for("interrupted after")
enter("kill %1; wait")
"#;
    on_a_terminal(&scratch, script);
}
