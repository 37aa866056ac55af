//! The tables of docs/from-qemu.md: they list every option of QEMU's programs, and each option does
//! what its row says: it works, or it is rejected by name.

use std::{fs, os::unix::fs::symlink, path::Path};

use crate::harness::{MIB, Scratch, Serve, TestClient, WEIR, assert_contains, qemu_img, text};

/// Starts the program in the background with the arguments under test, and ends it.
const RUN_ONE_TRIAL: &str = r#"
rm -f pid "$S"; "$@" || exit
if [ -e pid ]; then server=$(cat pid); kill "$server" 2>/dev/null; tail -s 0.01 --pid="$server" -f /dev/null; fi
true
"#;

/// The options of a row, the long form last, and what weir does with them.
struct OptionRow {
    options: Vec<String>,
    outcome: String,
}

/// The rows of the table below a heading.
fn table(heading: &str) -> Vec<OptionRow> {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-qemu.md");
    let document = fs::read_to_string(document).expect("it is a text");
    let (_, below) = document.split_once(&format!("\n## `{heading}`\n")).expect("the heading is there");
    let lines = below.lines().take_while(|line| !line.starts_with("## "));
    let rows = lines.filter(|line| line.starts_with("| `")).map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let options =
            cells.next().unwrap_or_default().split(", ").map(|option| option.trim_matches('`').to_owned());
        OptionRow { options: options.collect(), outcome: cells.next().unwrap_or_default().to_owned() }
    });
    rows.collect()
}

/// The options that QEMU's program lists in its help.
fn options_in_help(program: &str) -> Vec<String> {
    let help = TestClient::new(program).arg("--help").succeeds();
    let listed_options = help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(|line| {
        // Drop the suboptions and the description of an option.
        line.trim_start().split("  ").next().unwrap_or_default().split(", ").collect::<Vec<_>>()
    });
    let name = |option: &str| option.split(['=', ' ', '[']).next().unwrap_or_default().to_owned();
    let mut names: Vec<_> = listed_options.map(name).filter(|name| name.len() > 1).collect();
    names.sort();
    names.dedup();
    names
}

/// Tries each row of a program's table with the arguments in `trials`, which has one entry per row.
#[track_caller]
fn try_rows(program: &str, complete: &[&str], trials: &[(&str, &[&str])], no_device: &[&str]) {
    let rows = table(program);
    let all: Vec<&String> = rows.iter().flat_map(|row| &row.options).collect();
    for option in options_in_help(program) {
        assert!(all.contains(&&option), "{program} {option}: no row of the table has it");
    }
    let scratch = Scratch::new();
    scratch.sparse("disk.raw", MIB);
    let marked = scratch.path("marked.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&marked), "1M"]).succeeds();
    qemu_img(["bitmap", "--add", text(&marked), "b"]).succeeds();
    qemu_img(["snapshot", "-c", "one", text(&marked)]).succeeds();
    scratch.file("key", "abc");
    fs::create_dir(scratch.path("keys")).expect("the directory can be created");
    scratch.file("keys/keys.psk", "alice:00ff00ff\n");
    let link = scratch.path(program);
    let listed = Serve::new(&scratch).args(["memory:1M"]).start();
    symlink(WEIR, &link).expect("the link can be created");
    for row in &rows {
        let option = row.options.last().expect("a row has an option").as_str();
        let (_, trial) = trials
            .iter()
            .find(|(name, _)| *name == option)
            .unwrap_or_else(|| panic!("{option}: has a row, but no trial"));
        let alone = trial.iter().any(|argument| ["--help", "--version", "-d", "-L"].contains(argument));
        let complete = if alone { &[] } else { complete };
        let socket = scratch.socket("s");
        let arguments = complete.iter().chain(trial.iter());
        let arguments = arguments.map(|argument| {
            argument
                .replace("$S", text(&socket))
                .replace("$N", text(listed.socket()))
                .replace("$PWD", text(&scratch.path("")))
        });
        let outcome = TestClient::new("env")
            .arg(format!("S={}", text(&socket)))
            .args(["bash", "-c", RUN_ONE_TRIAL, "bash", text(&link)])
            .args(arguments)
            .inside(&scratch.path(""))
            .run();
        let stderr = outcome.stderr();
        let refusal =
            [": not supported (", "unexpected argument"].iter().any(|message| stderr.contains(message));
        match row.outcome.as_str() {
            "refused" => {
                assert_eq!(outcome.code(), 1, "{option}: {stderr}");
                assert!(refusal, "{option}: {stderr}");
                assert_contains(&stderr, &[option]);
            }
            "works" | "differs" | "no difference" => {
                assert!(!refusal, "{option}: {stderr}");
                let works = outcome.code() == 0 || no_device.contains(&option);
                assert!(works, "{option}: {}: {stderr}", outcome.code());
            }
            other => panic!("{option}: unknown outcome {other:?}"),
        }
    }
    for (option, _) in trials {
        assert!(all.iter().any(|known| known == option), "{option}: has a trial, but no row");
    }
}

#[test]
fn options_of_qemu_nbd_match_the_table() {
    let serve = ["--fork", "-t", "--pid-file=pid"];
    let raw = |options: &[&'static str]| [options, &["-k", "$S", "-f", "raw", "disk.raw"]].concat();
    let marked = |options: &[&'static str]| [options, &["-k", "$S", "-f", "qcow2", "marked.qcow2"]].concat();
    let tls = "tls-creds-psk,id=t,endpoint=server,dir=keys";
    let alice = "authz-simple,id=a,identity=alice";
    let trials: Vec<(&str, Vec<&str>)> = vec![
        ("FILE", raw(&[])),
        ("--port", vec!["-b", "127.0.0.1", "-p", "0", "-f", "raw", "disk.raw"]),
        ("--bind", vec!["-p", "0", "--bind=127.0.0.1", "-f", "raw", "disk.raw"]),
        ("--socket", vec!["--socket", "$S", "-f", "raw", "disk.raw"]),
        ("--shared", raw(&["-e", "5"])),
        ("--persistent", raw(&["--persistent"])),
        ("--export-name", raw(&["-x", "name"])),
        ("--description", raw(&["-D", "about"])),
        ("--offset", raw(&["-o", "4k"])),
        ("--allocation-depth", raw(&["-A"])),
        ("--bitmap", marked(&["-B", "b"])),
        ("--format", raw(&[])),
        ("--read-only", raw(&["-r"])),
        ("--snapshot", raw(&["-s"])),
        ("--load-snapshot", marked(&["-l", "one"])),
        ("--nocache", raw(&["-n"])),
        ("--cache", raw(&["--cache=writethrough"])),
        ("--aio", raw(&["--aio=native"])),
        ("--discard", raw(&["--discard=unmap"])),
        ("--detect-zeroes", raw(&["--detect-zeroes=on"])),
        ("--image-opts", vec!["-k", "$S", "--image-opts", "driver=raw,size=64k,file.filename=disk.raw"]),
        ("--connect", vec!["-c", "/dev/nbd0", "-f", "raw", "disk.raw"]),
        ("--disconnect", vec!["-d", "/dev/nbd0"]),
        ("--fork", raw(&[])),
        ("--pid-file", raw(&[])),
        ("--object", raw(&["--object", "secret,id=s,file=key"])),
        ("--tls-creds", raw(&["--object", tls, "--tls-creds", "t"])),
        ("--tls-authz", raw(&["--object", tls, "--tls-creds", "t", "--object", alice, "--tls-authz", "a"])),
        ("--tls-hostname", raw(&["--tls-hostname", "h"])),
        ("--list", vec!["-L", "-k", "$N"]),
        ("--trace", raw(&["-T", "nbd_*"])),
        ("--selinux-label", raw(&["--selinux-label", "l"])),
        ("--verbose", raw(&["-v"])),
        ("--help", vec!["--help"]),
        ("--version", vec!["--version"]),
    ];
    let trials: Vec<_> = trials.iter().map(|(option, arguments)| (*option, &**arguments)).collect();
    // The host's kernel may lack the NBD client; tests/guest covers it.
    try_rows("qemu-nbd", &serve, &trials, &["--connect", "--disconnect"]);
}

#[test]
fn options_of_qemu_storage_daemon_match_the_table() {
    let serve = ["--daemonize", "--pidfile", "$PWD/pid", "--blockdev", "null-co,node-name=n"];
    let socket = "addr.type=unix,addr.path=$S";
    let chardev = ["--chardev", "socket,id=c,path=$S,server=on,wait=off", "--monitor", "c"];
    let trials: [(&str, &[&str]); 11] = [
        ("--blockdev", &["--blockdev", "file,node-name=f,filename=$PWD/disk.raw"]),
        ("--export", &["--nbd-server", socket, "--export", "nbd,id=e,node-name=n"]),
        ("--object", &["--object", "throttle-group,id=g,limits.bps-total=1000000"]),
        ("--nbd-server", &["--nbd-server", socket]),
        ("--chardev", &chardev),
        ("--monitor", &chardev),
        ("--daemonize", &[]),
        ("--pidfile", &[]),
        ("--trace", &["--trace", "nbd_*"]),
        ("--help", &["--help"]),
        ("--version", &["--version"]),
    ];
    try_rows("qemu-storage-daemon", &serve, &trials, &[]);
}
