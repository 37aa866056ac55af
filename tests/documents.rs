//! The documentation is executable: each block of commands in README.md and docs/ is run as
//! written; the blocks of one document in one shell, one after another, in an empty directory.
//!
//! A block is fenced as `sh`, or as `console`, where lines that begin with `$ ` are commands and
//! all remaining lines show example output. The fence of a block that cannot run here gives the
//! reason after the language, where readers do not see it: `sh no-run: needs systemd`.
//!
//! Each document runs in separate namespaces: a network, so that any port is free; processes,
//! which end with it; and an empty /run and /var/lib. The shell continues once the servers report
//! that they are ready. A document fails with the first command that fails, including background
//! commands that it waits for, and if it leaves a process running.

use std::{fmt::Write as _, fs, path::Path, path::PathBuf, thread};

use crate::harness::{Scratch, TestClient, WEIR, need, need_root, script_without_foreign_mounts, text};

/// Shell code that runs before, between and after the blocks of a document.
const BEFORE: &str = r#"
set -Eemo pipefail
ip link set lo up
mount -t tmpfs run /run
mount -t tmpfs lib /var/lib
unset WEIR_QMP
# Images need a file system on a disk, for O_DIRECT and holes.
export TMPDIR=$1
stderr=$2
mkfifo "$stderr.pipe"
trap 'echo "$block: \`$BASH_COMMAND\` failed with status $?"' ERR
# An interactive shell drops ended jobs at its prompt, so that job numbers count running jobs.
# Here the first list marks ended jobs, the second one omits them.
trap 'jobs > /dev/null; jobs > /dev/null; echo "$block: \`$BASH_COMMAND\`" > "$stderr.at"' DEBUG
# Standard error, and the files that servers log to instead.
logs=("$stderr")
ready() { cat -- "${logs[@]}" | grep -c ' ready ' || true; }
# Waits until this number of servers is ready.
await() {
    # A server in the background may not have created its log yet, and tail would not follow it.
    touch -- "${logs[@]}"
    tail -q -n +1 -f -- "${logs[@]}" > "$stderr.pipe" & local tail=$!
    disown "$tail"
    grep -cm "$1" ' ready ' < "$stderr.pipe" > "$stderr.ready"
    kill "$tail" || true # tail may have ended, because its pipe has no reader
}
wait() {
    local jobs=("$@") job
    [[ ${jobs[*]} ]] || mapfile -t jobs < <(jobs -p)
    # On a slow host the job may have ended, and its job number be dropped; the PID stays known.
    for job in "${jobs[@]}"; do
        [[ $job != %* ]] || job=$(jobs -p "$job" 2> /dev/null) || continue
        builtin wait "$job"
    done
}
cd "$3"
exec 2> "$stderr"
"#;
const AFTER: &str = r#"
block='at its end'
! jobs -r | grep .
"#;

struct ShellBlock {
    line: usize,
    commands: String,
    /// Number of servers that the block leaves in the background.
    servers: usize,
    /// Log files of those servers that do not log to standard error.
    logs: Vec<String>,
}

/// The commands after a prompt, including their continuation lines.
fn typed_commands(lines: &[&str]) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    for line in lines {
        let continued = commands.last().is_some_and(|command| command.ends_with('\\'));
        if let Some(command) = line.strip_prefix("$ ") {
            commands.push(command.to_owned());
        } else if continued {
            let command = commands.last_mut().expect("there is one");
            *command += "\n";
            *command += line;
        }
    }
    commands
}

/// The blocks of `document` to run, and the errors in its fences.
fn blocks(document: &str) -> (Vec<ShellBlock>, Vec<String>) {
    let (mut blocks, mut errors) = (Vec::new(), Vec::new());
    let lines: Vec<&str> = document.lines().map(str::trim_start).collect();
    let fences: Vec<usize> = (0..lines.len()).filter(|&line| lines[line].starts_with("```")).collect();
    for fence in fences.chunks(2) {
        let &[from, to] = fence else { panic!("the last fence is not closed") };
        let (info, inside) = (lines[from].trim_start_matches('`'), &lines[from + 1..to]);
        let line = from + 1;
        let commands = match info.split_once(" no-run: ").unwrap_or((info, "")) {
            ("sh" | "console", reason) if !reason.is_empty() => continue,
            ("sh", _) => inside.join("\n"),
            ("console", _) => typed_commands(inside).join("\n"),
            ("", _) => {
                errors.push(format!("{line}: the fence names no language (`text` is for output)"));
                continue;
            }
            _ => {
                if inside.iter().any(|line| line.starts_with("$ ") || line.starts_with("# weir")) {
                    errors.push(format!("{line}: commands are fenced as `sh` or `console`"));
                }
                continue;
            }
        };
        let one_line = commands.replace("\\\n", " ");
        let begins = |line: &&str| {
            line.starts_with("weir serve ")
                && line.split('#').next().is_some_and(|line| line.trim_end().ends_with('&'))
        };
        let servers: Vec<&str> = one_line.lines().filter(begins).collect();
        let log = |line: &&str| line.split_once("2> ")?.1.split_whitespace().next().map(str::to_owned);
        let logs = servers.iter().filter_map(log).collect();
        blocks.push(ShellBlock { line, servers: servers.len(), logs, commands });
    }
    (blocks, errors)
}

fn script(name: &str, blocks: &[ShellBlock]) -> String {
    let mut script = BEFORE.to_owned();
    for ShellBlock { line, commands, servers, logs } in blocks {
        let _ = write!(script, "\nblock={name}:{line} were=$(ready)\n{commands}\n");
        for log in logs {
            let _ = writeln!(script, "logs+=(\"$PWD/{log}\")");
        }
        if *servers > 0 {
            let _ = writeln!(script, "await $((were + {servers}))");
        }
    }
    script + AFTER
}

/// Runs the blocks of `document`; returns the errors.
fn errors_of(root: &Path, document: &Path) -> Vec<String> {
    let name = text(document.strip_prefix(root).expect("it lies there"));
    let (blocks, mut failures) = blocks(&fs::read_to_string(document).expect("it is a text"));
    failures.iter_mut().for_each(|failure| failure.insert_str(0, &format!("{name}:")));
    if blocks.is_empty() {
        return failures;
    }
    let scratch = Scratch::new();
    let directories = ["tmp", "empty"].map(|name| scratch.path(name));
    directories.iter().for_each(|directory| fs::create_dir(directory).expect("the directory can be created"));
    let (script, output) =
        (scratch.file("script", script_without_foreign_mounts(&script(name, &blocks))), scratch.path("said"));
    let outcome = TestClient::new("unshare")
        .args(["--mount", "--net", "--pid", "--mount-proc", "--kill-child", "bash", text(&script)])
        .args([text(&directories[0]), text(&output), text(&directories[1])])
        .with_path(Path::new(WEIR).parent().expect("it lies in a directory"))
        .run();
    if outcome.status() != Some(0) {
        let last = |text: &str| {
            text.lines().rev().take(20).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n")
        };
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        failures.push(format!(
            "{name}: {}\n{}\nlast command: {}standard error:\n{}",
            last(&outcome.stderr()),
            last(&outcome.stdout()),
            read(&scratch.path("said.at")),
            last(&read(&output))
        ));
    }
    failures
}

fn markdown_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory)
        .expect("it is a directory")
        .map(|entry| entry.expect("it can be read").path());
    let found = |path: PathBuf| match path.is_dir() {
        true => markdown_below(&path),
        false if path.extension().is_some_and(|extension| extension == "md") => vec![path],
        false => vec![],
    };
    entries.flat_map(found).collect()
}

#[test]
fn every_documented_command_runs() {
    need_root("namespaces");
    for program in ["ip", "fio", "nbdinfo", "nbdcopy", "qemu-img"] {
        need(program);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut documents = markdown_below(&root.join("docs"));
    documents.push(root.join("README.md"));
    let failures: Vec<String> = thread::scope(|scope| {
        let run: Vec<_> =
            documents.iter().map(|document| scope.spawn(|| errors_of(&root, document))).collect();
        run.into_iter().flat_map(|thread| thread.join().expect("it does not panic")).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Socket options of QEMU in the code of a document, each with the assignments of its block.
fn sockets_of(document: &str) -> Vec<(String, String)> {
    let fenced = document.split("```").skip(1).step_by(2);
    let of_block = |block: &str| {
        let lines: Vec<&str> = block.lines().collect();
        let assignment = |line: &&&str| line.starts_with("reconnect=");
        let assignments: String = lines.iter().filter(assignment).map(|line| format!("{line}\n")).collect();
        let words: Vec<&str> = block.split_whitespace().collect();
        let of_words = words.windows(2).filter(|pair| ["-chardev", "chardev-add"].contains(&pair[0]));
        let reconnecting = of_words.map(|pair| pair[1]).filter(|option| option.contains("reconnect"));
        reconnecting.map(|option| (assignments.clone(), option.to_owned())).collect::<Vec<_>>()
    };
    fenced.flat_map(of_block).collect()
}

#[test]
fn documented_chardev_options_match_the_installed_qemu() {
    need("qemu-system-x86_64");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut documents = markdown_below(&root.join("docs"));
    documents.push(root.join("README.md"));
    let mut found = 0;
    for document in documents {
        for (assignments, option) in sockets_of(&fs::read_to_string(&document).expect("it is a text")) {
            // QEMU retries the connection, so the socket need not exist.
            let script = format!(
                "{assignments}exec qemu-system-x86_64 -machine none -nodefaults -display none \
                 -chardev {option} -monitor stdio <<< quit"
            );
            let outcome = TestClient::new("bash").args(["-c", &script]).run();
            assert_eq!(outcome.status(), Some(0), "{}: {option}: {}", document.display(), outcome.stderr());
            found += 1;
        }
    }
    assert!(found >= 2, "the documents have commands for virtual machines");
}

/// Reads objects from standard input, and prints the kind and the name of each, and the names that
/// it refers to. A duplicate key is an error, as for kubectl.
const OBJECTS: &str = r#"
import sys, yaml
class Strict(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice in {keys}"
        return super().construct_mapping(node, deep)
for one in yaml.load_all(sys.stdin, Loader=Strict):
    spec, kind = one.get("spec", {}), one["kind"]
    print(one["apiVersion"], kind, one["metadata"]["name"])
    if kind == "PersistentVolume":
        assert spec["local"]["path"].startswith("/") and spec["accessModes"] and spec["capacity"]["storage"]
        # Required fields of a local volume.
        (term,) = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
        assert term["matchExpressions"][0]["key"] == "kubernetes.io/hostname"
    if kind == "Pod":
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            for use in container.get("volumeMounts", []) + container.get("volumeDevices", []):
                print("claim", volumes[use["name"]]["persistentVolumeClaim"]["claimName"])
"#;

#[test]
fn kubernetes_objects_are_complete() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = fs::read_to_string(root.join("docs/containers.md")).expect("it is a text");
    let blocks: Vec<_> =
        document.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().expect("a part")).collect();
    let printed: Vec<String> = blocks
        .iter()
        .map(|block| TestClient::new("/usr/bin/python3").args(["-c", OBJECTS]).with_stdin(block).succeeds())
        .collect();
    let kinds = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(
        kinds(&printed[0]),
        [
            "storage.k8s.io/v1 StorageClass weir",
            "v1 PersistentVolume weir-db",
            "v1 PersistentVolumeClaim db",
            "v1 Pod db",
            "claim db"
        ]
    );
    assert_eq!(
        kinds(&printed[1]),
        ["v1 PersistentVolume weir-files", "v1 PersistentVolumeClaim files", "v1 Pod files", "claim files"]
    );
}

#[test]
fn fences_select_executable_blocks() {
    let document = "a\n```sh\nweir serve a \\\n  b & # c\nweir serve d\n```\n  ```console\n  $ \
                    weir \\\n  status\n  DISK\n  ```\n```sh no-run: \
                    why\nfalse\n```\n```\nx\n```\n```text\n$ y\n```\n";
    let (blocks, errors) = blocks(document);
    let found: Vec<_> =
        blocks.iter().map(|block| (block.line, block.commands.as_str(), block.servers)).collect();
    assert_eq!(found, [(2, "weir serve a \\\nb & # c\nweir serve d", 1), (7, "weir \\\nstatus", 0)]);
    assert_eq!(errors.len(), 2, "{errors:?}");
}
