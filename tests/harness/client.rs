//! External programs under a deadline. A missing program fails the test with the name of its
//! package.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{Seek as _, Write as _},
    path::Path,
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

use serde_json::Value;

use super::{Scratch, text};

/// Debian package of each program. `scripts/deps` installs them all.
const PACKAGES: [(&str, &str); 30] = [
    ("chromium", "chromium"),
    ("debugfs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("fio", "fio"),
    ("fish", "fish"),
    ("fusermount3", "fuse3"),
    ("groff", "groff-base"),
    ("ip", "iproute2"),
    ("losetup", "mount"),
    ("mandoc", "mandoc"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mountpoint", "util-linux"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdsh", "python3-libnbd"),
    ("openssl", "openssl"),
    ("podman", "podman"),
    ("prove", "perl"),
    ("psktool", "gnutls-bin"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("qemu-nbd", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("setpriv", "util-linux"),
    ("systemd-analyze", "systemd"),
    ("timeout", "coreutils"),
    ("unshare", "util-linux"),
    ("virt-xml-validate", "libvirt-clients"),
    ("zsh", "zsh"),
];

/// Where `scripts/python-clients` installs programs that Debian lacks.
const PYTHON_CLIENTS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../python-clients/bin");
/// Where `scripts/prometheus` installs it: Debian's package would start it as a service.
const PROMETHEUS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../prometheus/bin");
/// Where `scripts/etcd` installs etcd, for the same reason.
const ETCD: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../etcd/bin");

pub(crate) const WEIR: &str = env!("CARGO_BIN_EXE_weir");

/// Maximum run time of a client in seconds, generous enough for a host that stalls at times.
const TIMEOUT_SECONDS: &str = "900";

/// QEMU's error when it creates a LUKS image and the kernel has accounted no CPU time for it: on
/// some hosts every third call.
const CPU_USAGE_ERROR: &str = "Unable to get accurate CPU usage";

/// Maximum number of runs of a client that fails with this error.
const MAX_ATTEMPTS: u32 = 30;

/// Debian's own directories come first: nbdsh needs the `python3` that its modules are built for,
/// and losetup is in a directory that only root's path contains.
pub(crate) fn search_path() -> OsString {
    let mut path = OsString::from("/usr/sbin:/usr/bin:/sbin:/bin:");
    path.push(PYTHON_CLIENTS);
    path.push(":");
    path.push(PROMETHEUS);
    path.push(":");
    path.push(ETCD);
    if let Some(inherited) = env::var_os("PATH") {
        path.push(":");
        path.push(inherited);
    }
    path
}

/// Fails the test with the name of the package if a program is missing.
#[track_caller]
pub(crate) fn need(program: &str) {
    if env::split_paths(&search_path()).any(|directory| directory.join(program).is_file()) {
        return;
    }
    // Programs that Debian lacks, or would start as a service, are installed by scripts.
    assert!(
        !(program.starts_with("qmp-") || ["page-python", "schemathesis"].contains(&program)),
        "{program}: not found (run `scripts/python-clients`, which installs it in the target directory)"
    );
    assert!(
        !program.starts_with("prom"),
        "{program}: not found (run `scripts/prometheus`, which unpacks it in the target directory)"
    );
    assert!(
        !program.starts_with("etcd"),
        "{program}: not found (run `scripts/etcd`, which unpacks it in the target directory)"
    );
    let package =
        PACKAGES.iter().find(|(name, _)| *name == program).map_or("that has it", |(_, package)| package);
    panic!("{program}: not found (install the Debian package {package}, or run `make deps`)");
}

pub(crate) struct TestClient {
    command: Command,
    name: String,
    input: Option<File>,
}

impl TestClient {
    #[track_caller]
    pub(crate) fn new(program: &str) -> Self {
        need(program);
        need("timeout");
        // timeout(1) signals the whole process group, so children of the program end as well.
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", TIMEOUT_SECONDS, program]);
        // libnbd's and QEMU's messages are compared in English.
        command
            .env("LC_ALL", "C.UTF-8")
            .env("PATH", search_path())
            .env_remove("LIBNBD_DEBUG")
            .env_remove("LISTEN_FDS")
            // The client must neither find the host's own daemon nor start one at its address.
            .env("WEIR_QMP", "unix:/nonexistent/qmp.sock");
        Self { command, name: program.to_owned(), input: None }
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.name.push(' ');
        self.name.push_str(&argument.as_ref().to_string_lossy());
        self.command.arg(argument);
        self
    }

    pub(crate) fn args<T: AsRef<OsStr>>(self, arguments: impl IntoIterator<Item = T>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    pub(crate) fn with_stdin(self, text: &str) -> Self {
        // A file and not a pipe: it can be rewound for another attempt.
        let mut file = tempfile::tempfile().expect("the system has a temporary directory");
        file.write_all(text.as_bytes()).and_then(|()| file.rewind()).expect("there is room for a line");
        Self { input: Some(file), ..self }
    }

    /// Describes the test case, for messages of failures.
    pub(crate) fn describing(self, description: &str) -> Self {
        Self { name: format!("{description}: {}", self.name), ..self }
    }

    pub(crate) fn inside(mut self, directory: &Path) -> Self {
        self.command.current_dir(directory);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Puts a directory at the front of the search path.
    pub(crate) fn with_path(mut self, directory: &Path) -> Self {
        let mut path = directory.as_os_str().to_owned();
        path.push(":");
        path.push(search_path());
        self.command.env("PATH", path);
        self
    }

    #[track_caller]
    pub(crate) fn run(mut self) -> TestOutcome {
        let mut output = self.output();
        for _ in 1..MAX_ATTEMPTS {
            if !String::from_utf8_lossy(&output.stderr).contains(CPU_USAGE_ERROR) {
                break;
            }
            output = self.output();
        }
        TestOutcome { name: self.name, output }
    }

    #[track_caller]
    fn output(&mut self) -> Output {
        let rewound = |file: &mut File| file.rewind().and_then(|()| file.try_clone());
        let input = self.input.as_mut().map(|file| rewound(file).expect("the input is a regular file"));
        let output = self.command.stdin(input.map_or_else(Stdio::null, Stdio::from)).output();
        let output = output.expect("`timeout` was found");
        // Status 124: the deadline has passed; 137: SIGKILL five seconds later.
        assert!(
            !matches!(output.status.code(), Some(124 | 137)),
            "{}: took more than {TIMEOUT_SECONDS} s; standard error:\n{}",
            self.name,
            String::from_utf8_lossy(&output.stderr)
        );
        output
    }

    #[track_caller]
    pub(crate) fn succeeds(self) -> String {
        self.run().succeeded()
    }

    /// Asserts success; parses the output as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let printed = self.succeeds();
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("no JSON: {error}:\n{printed}"))
    }

    /// Runs qemu-io with these commands, each of which must succeed; qemu-io's exit status does not
    /// show that.
    #[track_caller]
    pub(crate) fn run_qemu_io<T: AsRef<OsStr>>(
        self,
        commands: impl IntoIterator<Item = T>,
        target: impl AsRef<OsStr>,
    ) -> String {
        let client = commands.into_iter().fold(self, |client, command| client.arg("-c").arg(command));
        let client = client.arg(target);
        let name = client.name.clone();
        let printed = client.succeeds();
        // qemu-io prints errors of its commands on stdout and exits with 0.
        let wrong = ["failed", "error", "not support"];
        assert!(
            !wrong.iter().any(|pattern| printed.to_lowercase().contains(pattern)),
            "{name} printed:\n{printed}"
        );
        printed
    }

    /// Asserts failure by an exit status; returns standard error.
    #[track_caller]
    pub(crate) fn fails(self) -> String {
        let outcome = self.run();
        let stderr = outcome.stderr();
        assert!(
            outcome.output.status.code().is_some_and(|code| code != 0),
            "{} should have failed; {stderr}",
            outcome.name
        );
        stderr
    }
}

pub(crate) struct TestOutcome {
    name: String,
    output: Output,
}

impl TestOutcome {
    /// Exit status; a client that was killed by a signal fails the test.
    #[track_caller]
    pub(crate) fn code(&self) -> i32 {
        self.output.status.code().unwrap_or_else(|| panic!("{}: {}", self.name, self.output.status))
    }

    /// Exit status; None if killed by a signal, as `timeout` does at the deadline.
    pub(crate) fn status(&self) -> Option<i32> {
        self.output.status.code()
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    #[track_caller]
    pub(crate) fn succeeded(self) -> String {
        let printed = String::from_utf8_lossy(&self.output.stdout).into_owned();
        assert!(
            self.output.status.success(),
            "{}: {}\nstandard output:\n{printed}\nstandard error:\n{}",
            self.name,
            self.output.status,
            self.stderr()
        );
        printed
    }
}

#[track_caller]
pub(crate) fn weir(arguments: &[&str]) -> TestClient {
    TestClient::new(WEIR).args(arguments)
}

#[track_caller]
pub(crate) fn weir_image(arguments: &[&str]) -> TestClient {
    weir(&["image"]).args(arguments)
}

#[track_caller]
pub(crate) fn qemu_img<T: AsRef<OsStr>>(arguments: impl IntoIterator<Item = T>) -> TestClient {
    TestClient::new("qemu-img").args(arguments)
}

#[track_caller]
pub(crate) fn qemu_io<O: AsRef<OsStr>, C: AsRef<OsStr>>(
    options: impl IntoIterator<Item = O>,
    commands: impl IntoIterator<Item = C>,
    target: impl AsRef<OsStr>,
) -> String {
    TestClient::new("qemu-io").args(options).run_qemu_io(commands, target)
}

pub(crate) fn nbdsh_command(script: &str) -> Command {
    need("nbdsh");
    let mut command = Command::new("nbdsh");
    command.args(["-c", script]).env("PATH", search_path());
    command
}

/// Size of an export in bytes, as printed by nbdinfo.
#[track_caller]
pub(crate) fn export_size(uri: &str) -> u64 {
    let size = TestClient::new("nbdinfo").args(["--size", uri]).succeeds();
    size.trim().parse().expect("a number of bytes")
}

/// Creates an image of 8 MiB with LUKS, with a fast key derivation. All are copies of one that QEMU
/// has created, because QEMU measures the speed of the processor for two seconds each time.
#[track_caller]
pub(crate) fn create_encrypted(path: &Path) {
    static CONTENT: OnceLock<Vec<u8>> = OnceLock::new();
    let content = CONTENT.get_or_init(|| {
        let scratch = Scratch::new();
        let created = scratch.path("encrypted.qcow2");
        qemu_img(["create", "-q", "-f", "qcow2", "--object", "secret,id=key,data=abc", "-o"])
            .args(["encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10", text(&created), "8M"])
            .succeeds();
        fs::read(created).expect("QEMU has created it")
    });
    fs::write(path, content).expect("the file can be written");
}

/// Runs nbdsh: `h` is an unconnected handle, `nbd` the module; a failed assertion fails the test.
#[track_caller]
pub(crate) fn nbdsh<T: AsRef<OsStr>>(script: &str, arguments: impl IntoIterator<Item = T>) -> String {
    // Rust's debug format of a string is a valid Python literal for these arguments.
    let quoted = |argument: T| format!("{:?}", argument.as_ref().to_string_lossy());
    let list: Vec<String> = arguments.into_iter().map(quoted).collect();
    let prelude = format!("arguments = [{}]\n", list.join(", "));
    TestClient::new("nbdsh").arg("-c").arg(prelude + script).succeeds()
}
