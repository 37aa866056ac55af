//! Claims of docs/recipes.md beside its commands, which the test of the documents runs: libvirt
//! accepts the XML for it, there and in other documents, and clients survive a restart of weir as
//! described.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

use crate::harness::{MIB, Scratch, Serve, TestClient, Weir, nbdsh, need, search_path, text};

/// A virtual machine with these devices, as libvirt's schema requires it.
fn machine(devices: &str) -> String {
    format!(
        "<domain type='kvm'><name>vm1</name><memory>1048576</memory><memoryBacking><source type='memfd'/>\
         <access mode='shared'/></memoryBacking><os><type arch='x86_64'>hvm</type></os>\
         <devices>{devices}</devices></domain>"
    )
}

#[test]
fn libvirt_accepts_the_disks() {
    let scratch = Scratch::new();
    let validate = |name: &str, devices: &str| {
        let file = scratch.file(name, machine(devices));
        TestClient::new("virt-xml-validate").args([text(&file), "domain"]).run()
    };
    let mut disks = 0;
    // Debian's libvirt 9.0 is one version too old for this element.
    const NEWER: &str = "<reconnect delay='30'/>";
    for document in ["recipes.md", "virtual-machines.md", "migration.md"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(document);
        let content = fs::read_to_string(path).expect("it is a text");
        for block in content.split("```xml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            let from = block.find("<disk ").expect("a disk");
            let to = block.find("</disk>").expect("the element has an end") + "</disk>".len();
            let outcome = validate(document, &block[from..to].replace(NEWER, ""));
            assert_eq!(outcome.code(), 0, "{document}: {}{}", outcome.stdout(), outcome.stderr());
            disks += 1;
        }
    }
    assert_eq!(disks, 3, "a document has no disk element");
    assert_ne!(
        validate("wrong", "<disk type='network'><bogus/></disk>").code(),
        0,
        "the validator must report an error"
    );
}

/// A disk on a socket with a fixed path. One weir process after another serves it.
struct RecipeSite {
    scratch: Scratch,
}

impl RecipeSite {
    fn new() -> Self {
        let scratch = Scratch::new();
        scratch.sparse("disk.raw", MIB);
        Self { scratch }
    }

    fn serve(&self) -> Weir {
        Serve::new(&self.scratch).arg(self.scratch.path("disk.raw")).start()
    }

    fn socket(&self) -> String {
        text(&self.scratch.socket("nbd")).to_owned()
    }
}

/// An interactive qemu-io.
struct QemuIoSession {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl QemuIoSession {
    fn new(site: &RecipeSite, more: &str) -> Self {
        need("qemu-io");
        let options = format!("driver=nbd,server.type=unix,server.path={},export=disk{more}", site.socket());
        let mut child = Command::new("qemu-io")
            .args(["--image-opts", &options])
            .env("PATH", search_path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it was found");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output }
    }

    fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").expect("it reads");
    }

    /// True if the last command succeeded, according to its output.
    fn succeeded(&mut self) -> bool {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).expect("it writes text"), 0, "it has ended");
            match line.to_lowercase() {
                line if line.contains("failed") || line.contains("error") => return false,
                line if line.contains("wrote ") || line.contains("read ") && line.contains(" bytes") => {
                    return true;
                }
                _ => {}
            }
        }
    }

    fn run(&mut self, command: &str) -> bool {
        self.send(command);
        self.succeeded()
    }
}

impl Drop for QemuIoSession {
    fn drop(&mut self) {
        let _ = writeln!(self.input, "quit");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn qemu_waits_for_its_reconnect_delay() {
    let site = RecipeSite::new();
    let weir = site.serve();
    let mut session = QemuIoSession::new(&site, ",reconnect-delay=300");
    assert!(session.run("write -P 5 0 4k"));
    weir.crash();
    session.send("write -P 6 4k 4k");
    let weir = site.serve();
    assert!(session.succeeded(), "it has waited, and is sent again");
    assert!(session.run("read -P 5 0 4k") && session.run("read -P 6 4k 4k"));
    drop(session);
    weir.stop();
}

#[test]
fn qemu_continues_after_a_restart_of_weir() {
    let site = RecipeSite::new();
    for more in ["", ",reconnect-delay=1"] {
        let weir = site.serve();
        let mut session = QemuIoSession::new(&site, more);
        assert!(session.run("write -P 5 0 4k"), "{more}");
        weir.stop();
        assert!(!session.run("write -P 6 4k 4k"), "{more}: no server");
        let weir = site.serve();
        // QEMU retries the connection at its own interval.
        while !session.run("write -P 7 4k 4k") {}
        assert!(session.run("read -P 5 0 4k") && session.run("read -P 7 4k 4k"), "{more}");
        drop(session);
        weir.stop();
    }
}

/// The pauses of the table in seconds: `WEIR_PAUSES=1,10,60`, or the shortest. The pauses are the
/// subject of the test, so it sleeps; it asserts no durations.
fn pauses() -> Vec<Duration> {
    let value = std::env::var("WEIR_PAUSES").unwrap_or_else(|_| "1".to_owned());
    value.split(',').map(|text| Duration::from_secs(text.parse().expect("seconds"))).collect()
}

#[test]
fn pauses_match_the_table() {
    for pause in pauses() {
        let site = RecipeSite::new();
        let weir = site.serve();
        let (mut waiting, mut failing) =
            (QemuIoSession::new(&site, ",reconnect-delay=300"), QemuIoSession::new(&site, ""));
        assert!(waiting.run("write -P 5 0 4k") && failing.run("read -P 5 0 4k"));
        weir.crash();
        waiting.send("write -P 6 4k 4k");
        assert!(!failing.run("read -P 5 0 4k"), "{pause:?}: it does not wait");
        thread::sleep(pause);
        assert!(!failing.run("read -P 5 0 4k"), "{pause:?}: no server");
        let weir = site.serve();
        assert!(waiting.succeeded(), "{pause:?}: it has waited, and is sent again");
        assert!(waiting.run("read -P 6 4k 4k"), "{pause:?}");
        while !failing.run("read -P 6 4k 4k") {}
        drop((waiting, failing));
        weir.stop();
    }
}

#[test]
fn libnbd_fails_without_reconnecting() {
    let site = RecipeSite::new();
    let weir = site.serve();
    let script = "
import os, signal
h.connect_uri(arguments[0])
h.pwrite(b'x' * 512, 0, nbd.CMD_FLAG_FUA)
os.kill(int(arguments[1]), signal.SIGTERM)
for _ in range(2):
    try:
        while True:
            h.pread(512, 0)
    except nbd.Error:
        pass
    else:
        raise SystemExit('it should have failed')
";
    nbdsh(script, [weir.uri("disk"), weir.pid().to_string()]);
    weir.wait();
}
