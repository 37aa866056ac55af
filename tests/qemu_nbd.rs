//! weir under the name of qemu-nbd: the same scripts run with QEMU's program and with a link to
//! weir; compares what clients see, the content of the image, and the exit status.

use crate::harness::{
    MIB, Scratch, Serve, TestClient, assert_contains, create_encrypted, need, pattern, peer, peer::ScriptRun,
    qemu_img, text,
};

/// Runs it in the background until `stop`.
const SERVE: &str = r#"serve() { qemu-nbd --fork -k "$S" --pid-file=pid "$@" || echo "did not start: $?"; }"#;

#[track_caller]
fn compare_script(script: &str, prepare: impl Fn(&Scratch)) -> ScriptRun {
    peer::compare_with_qemu("qemu-nbd", &format!("{SERVE}\n{script}"), prepare)
}

fn filled(scratch: &Scratch) {
    scratch.filled("disk.raw", MIB);
}

#[test]
fn clients_see_the_same_export() {
    let script = r#"
serve -t -f raw -D "the first" disk.raw; about; stop
serve -t -f raw -x vm1 -e 3 -r disk.raw; about "nbd+unix:///vm1?socket=$S"; nbdinfo --can write "$uri" >/dev/null; stop
serve -t -f raw -e 0 -o 4096 disk.raw; about; qemu-img map --output=json "$uri" | grep -c data; stop
serve -t --image-opts driver=raw,offset=8192,size=64k,file.driver=file,file.filename=disk.raw; about; stop
serve -t -f raw -n --aio=native disk.raw; about; stop
umask 007; serve -t -f raw --cache=directsync disk.raw; stat -c %a "$S"; stop
"#;
    let ran = compare_script(script, filled);
    assert_contains(&ran.stdout, &["\"export-size\": 1048576", "\"export-size\": 1044480", "770"]);
    assert_eq!(ran.stderr.lines().filter(|line| line.starts_with("qemu-nbd: ")).count(), 0, "{}", ran.stderr);
}

#[test]
fn writes_leave_the_same_image() {
    let script = r#"
serve -t -f raw disk.raw
write_at 0x11 0 4k; write_at 0x22 700000 1000
nbdsh -u "$uri" -c 'h.trim(65536, 131072)' -c 'h.zero(65536, 262144)' -c 'h.flush()'
read_at 0x11 0 4k; stop
serve -t -f raw --discard=unmap disk.raw
nbdsh -u "$uri" -c 'h.trim(131072, 524288)' -c 'h.flush()'; read_at 0 524288 131072; stop
[ $(($(stat -c %b disk.raw) * 512)) -lt 1048576 ] && echo "a hole"
"#;
    let ran = compare_script(script, filled);
    assert_contains(&ran.stdout, &["a hole"]);
    let discarded = 131_072..131_072 + 65_536;
    assert!(
        ran.bytes("disk.raw")[discarded.clone()] == pattern(MIB as usize)[discarded],
        "a discard was passed on"
    );
}

#[test]
fn server_ends_with_its_last_client() {
    let script = r#"
serve -f raw disk.raw; server=$(cat pid)
nbdinfo --size "nbd+unix:///other?socket=$S" 2>/dev/null | cat
about | head -1; ended "$server"; ls "$S" 2>/dev/null
qemu-nbd -k "$S" -f raw disk.raw & server=$!
until nbdinfo --size "$uri" 2>/dev/null; do :; done
wait $server; echo "it ended with $?"
nbdinfo --size -- [ qemu-nbd -f raw disk.raw ]
"#;
    // qemu-nbd has no export named `other`. weir's only export is the default, not `other`.
    assert_contains(&compare_script(script, filled).stdout, &["it ended with 0"]);
}

#[test]
fn snapshot_mode_leaves_the_image_unchanged() {
    let script = r#"
serve -t -s -f raw disk.raw; write_at 0x55 0 64k; read_at 0x55 0 64k; ls weir-snapshot-* 2>/dev/null; stop
serve -t -s base.qcow2; write_at 0x55 0 64k; read_at 0x55 0 64k; stop
serve -t -f qcow2 base.qcow2; read_at 0x77 0 64k; stop
serve -t -f qcow2 -l one base.qcow2; about | grep read_only; read_at 0x33 0 64k; stop
serve -t -f qcow2 -l snapshot.name=one base.qcow2; read_at 0x33 0 64k; stop
qemu-img check -q base.qcow2; echo "checked: $?"
"#;
    let ran = compare_script(script, |scratch| {
        filled(scratch);
        let base = scratch.path("base.qcow2");
        qemu_img(["create", "-q", "-f", "qcow2", text(&base), "8M"]).succeeds();
        for (byte, then) in [("0x33", Some("one")), ("0x77", None)] {
            let write = format!("write -P {byte} 0 64k");
            TestClient::new("qemu-io").args(["-f", "qcow2"]).run_qemu_io([write], &base);
            if let Some(name) = then {
                qemu_img(["snapshot", "-c", name, text(&base)]).succeeds();
            }
        }
    });
    assert!(ran.bytes("disk.raw") == pattern(MIB as usize), "the image is unchanged");
    assert_contains(&ran.stdout, &["checked: 0", "\"is_read_only\": true"]);
}

#[test]
fn options_of_secrets_bitmaps_and_tls_match() {
    let script = r#"
serve -t --object secret,id=s,data=abc --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=locked.qcow2
write_at 0x11 0 64k; stop
printf abc > key
serve -t --object secret,id=s,file=key --image-opts driver=qcow2,encrypt.format=luks,encrypt.key-secret=s,file.filename=locked.qcow2
read_at 0x11 0 64k; stop
serve -t -r -f qcow2 -B b0 -B b1 marked.qcow2
nbdinfo --map=qemu:dirty-bitmap:b0 "$uri"; nbdinfo --map=qemu:dirty-bitmap:b1 "$uri"; stop
mkdir keys; psktool -u alice -p keys/keys.psk >/dev/null 2>&1
serve -t --object tls-creds-psk,id=t,endpoint=server,dir="$PWD/keys" --tls-creds t -f raw disk.raw
nbdinfo --size "nbds+unix://alice@/?socket=$S&tls-psk-file=$PWD/keys/keys.psk"
nbdinfo --size "$uri" 2>/dev/null || echo "not without it"; stop
"#;
    need("psktool");
    let ran = compare_script(script, |scratch| {
        filled(scratch);
        create_encrypted(&scratch.path("locked.qcow2"));
        let marked = scratch.path("marked.qcow2");
        qemu_img(["create", "-q", "-f", "qcow2", text(&marked), "8M"]).succeeds();
        for name in ["b0", "b1"] {
            qemu_img(["bitmap", "--add", text(&marked), name]).succeeds();
        }
        TestClient::new("qemu-io").args(["-f", "qcow2"]).run_qemu_io(["write 1M 64k"], &marked);
    });
    assert_contains(&ran.stdout, &["not without it", "dirty"]);
}

#[test]
fn tcp_address_options_match() {
    // Below the range of ephemeral ports (ip(7), ip_local_port_range).
    let port = 20_000 + std::process::id() % 10_000;
    let script = format!(
        r#"
qemu-nbd --fork -t -b 127.0.0.1 -p {port} -f raw --pid-file=pid disk.raw; echo $?
nbdinfo --size nbd://127.0.0.1:{port}
server=$(cat pid); qemu-nbd -p {port} -b 127.0.0.1 -f raw other.raw 2>/dev/null; echo "in use: $?"
kill $server; ended $server
"#
    );
    // The programs run consecutively: both use the port.
    let ran = compare_script(&script, |scratch| {
        filled(scratch);
        scratch.sparse("other.raw", MIB);
    });
    assert_contains(&ran.stdout, &["0\n1048576\nin use: 1"]);
}

#[test]
fn errors_have_the_same_status() {
    let cases = [
        "",
        "--bogus disk.raw",
        "disk.raw disk.raw",
        "-f raw missing",
        "-f bogus disk.raw",
        "-k $S -e -1 disk.raw",
        "-k $S -f raw -o x disk.raw",
        "-k $S -f raw --cache=x disk.raw",
        "-k $S -f raw --discard=x disk.raw",
        "-k $S -f raw --aio=x disk.raw",
        "-n --cache=none disk.raw",
        "--image-opts -f raw driver=raw,file.filename=disk.raw",
        "-k $S -f raw --tls-creds t disk.raw",
        "-k $S -f raw -l none disk.raw",
        "--object bogus,id=x -k $S -f raw disk.raw",
        "-k $S --fork -f raw missing",
        "-k $S -f raw -B none disk.raw",
        "-d",
        "-k /nonexistent/s -f raw disk.raw",
    ];
    let line = |case: &&str| format!("timeout 60 qemu-nbd {case}; echo \"$?\"\n");
    let script: String = cases.iter().map(line).collect();
    let ran = compare_script(&script, filled);
    assert_eq!(ran.stdout, "1\n".repeat(cases.len()));
    let named = ran.stderr.lines().filter(|line| line.starts_with("qemu-nbd: ")).count();
    assert_eq!(named, cases.len(), "each prints one line with the program's name:\n{}", ran.stderr);
}

#[test]
fn list_of_another_server_matches() {
    // Both programs list the same server, which is weir.
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", MIB);
    let weir = Serve::new(&scratch)
        .args([text(&image), "memory:2M", "--name", "a b", "--name", "second"])
        .args(["--description", "the first", "--description", ""])
        .start();
    let script = format!(
        "qemu-nbd -L -k {socket}; qemu-nbd -L -k {socket} x; echo $?; qemu-nbd -L -k {socket} -x x; echo $?
         qemu-nbd -L -k {socket}.none; echo $?",
        socket = text(weir.socket())
    );
    assert_contains(
        &compare_script(&script, filled).stdout,
        &["exports available: 2", "the first", "1\n1\n1\n"],
    );
}
