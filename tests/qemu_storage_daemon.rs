//! weir under the name of qemu-storage-daemon: the same scripts run with QEMU's program and with a
//! link to weir; compares what clients see. `weir serve` has the same options.

use crate::harness::{
    MIB, Scratch, Serve, TestClient, assert_contains, create_encrypted, export_size, need, need_root,
    pattern, peer, peer::ScriptRun, qemu_img, text,
};

/// `serve` runs it in the background until `stop`; `ask` sends a QMP command and prints the reply.
const PRELUDE: &str = r#"
serve() { qemu-storage-daemon --daemonize --pidfile "$PWD/pid" "$@" || echo "did not start: $?"; }
nbd() { echo --nbd-server addr.type=unix,addr.path="$S$1"; }
ask() {
    /usr/bin/python3 - "$PWD/qmp" "$1" <<'END'
import json, socket, sys
stream = socket.socket(socket.AF_UNIX)
stream.connect(sys.argv[1])
lines = stream.makefile("rw")
def ask(text):
    print(text, file=lines, flush=True)
    while True:
        answer = json.loads(lines.readline())
        if "return" in answer or "error" in answer:
            return answer
lines.readline()
ask('{"execute": "qmp_capabilities"}')
answer = ask('{"execute": "' + sys.argv[2] + '"}')
print(json.dumps(answer.get("return", answer), sort_keys=True))
END
}
"#;

#[track_caller]
fn compare_script(script: &str, prepare: impl Fn(&Scratch)) -> ScriptRun {
    peer::compare_with_qemu("qemu-storage-daemon", &format!("{PRELUDE}{script}"), prepare)
}

fn filled(scratch: &Scratch) {
    scratch.filled("disk.raw", MIB);
}

#[test]
fn blockdev_accepts_json_and_key_value() {
    let script = r#"
serve $(nbd "") --blockdev driver=file,node-name=f,filename="$PWD/disk.raw" --export nbd,id=e,node-name=f,name=,writable=on
about; write_at 0x11 4096 4k; stop
serve --object throttle-group,id=g,limits.iops-total=100000,x-bps-total=1000000000 \
    --blockdev '{"driver": "raw", "node-name": "r", "file": {"driver": "file", "filename": "'"$PWD"'/disk.raw"}}' \
    --blockdev throttle,node-name=t,throttle-group=g,file=r,read-only=off $(nbd ,max-connections=1) \
    --export '{"type": "nbd", "id": "e", "node-name": "t", "name": "", "description": "about"}'
about; read_at 0x11 4096 4k; stop
serve --blockdev raw,node-name=r,read-only=on,file.driver=file,file.filename="$PWD/disk.raw",file.locking=auto \
    --nbd-server addr.type=unix,addr.path="$S" --export type=nbd,id=e,node-name=r,name=disk
about "nbd+unix:///disk?socket=$S"; stop
"#;
    let ran = compare_script(script, filled);
    assert_contains(&ran.stdout, &["\"can_multi_conn\": false", "\"can_multi_conn\": true", "about"]);
}

#[test]
fn format_node_references_a_named_file_node() {
    let script = r#"
serve --blockdev driver=file,node-name=file,filename=disk.qcow2,aio=threads \
    --blockdev driver=qcow2,node-name=image,file=file $(nbd "") \
    --export nbd,id=e,node-name=image,name=,writable=on
about; write_at 0x22 4096 4k; stop
qemu-img compare -f qcow2 -F raw disk.qcow2 disk.raw || qemu-img check -q disk.qcow2 && echo sound
"#;
    let ran = compare_script(script, |scratch| {
        filled(scratch);
        qemu_img(["create", "-q", "-f", "qcow2", text(&scratch.path("disk.qcow2")), "1M"]).succeeds();
    });
    assert_contains(&ran.stdout, &["Content mismatch at offset 0", "sound"]);
}

#[test]
fn monitor_is_a_control_socket() {
    let script = r#"
serve --chardev socket,path="$PWD/qmp",server=on,wait=off,id=c --monitor chardev=c \
    --blockdev null-co,node-name=n,size=1048576,read-zeroes=on $(nbd "") --export nbd,id=e,node-name=n,name=
ask query-block-exports; about | grep size; ask nbd-server-stop; ask query-block-exports
[ ! -e "$S" ] && echo "its socket has gone"; ask nbd-server-stop >/dev/null; ask quit
ended "$(cat pid 2>/dev/null || echo 1000000000)"
"#;
    assert_contains(&compare_script(script, |_| ()).stdout, &["\"id\": \"e\"", "its socket has gone"]);
}

#[test]
fn exports_secrets_and_tls_are_supported() {
    need_root("mounts of FUSE");
    need("psktool");
    let script = r#"
touch seen
serve --blockdev file,node-name=f,filename="$PWD/disk.raw" --export fuse,id=u,node-name=f,mountpoint="$PWD/seen",writable=on \
    --export vhost-user-blk,id=v,node-name=f,addr.type=unix,addr.path="$S",num-queues=2
cmp seen disk.raw && stat -c %s seen; [ -S "$S" ] && echo "a socket for a machine"; stop
printf abc > key
serve $(nbd "") --object secret,id=s,file="$PWD/key" \
    --blockdev qcow2,node-name=q,encrypt.format=luks,encrypt.key-secret=s,file.driver=file,file.filename="$PWD/locked.qcow2" \
    --export nbd,id=e,node-name=q,name=,writable=on
write_at 0x33 0 64k; read_at 0x33 0 64k; stop
mkdir keys; psktool -u alice -p keys/keys.psk >/dev/null 2>&1
serve --object tls-creds-psk,id=t,endpoint=server,dir="$PWD/keys" $(nbd ,tls-creds=t) \
    --blockdev null-co,node-name=n,size=1048576 --export nbd,id=e,node-name=n,name=
nbdinfo --size "nbds+unix://alice@/?socket=$S&tls-psk-file=$PWD/keys/keys.psk"
nbdinfo --size "$uri" 2>/dev/null || echo "not without it"; stop
"#;
    let ran = compare_script(script, |scratch| {
        filled(scratch);
        create_encrypted(&scratch.path("locked.qcow2"));
    });
    assert_contains(&ran.stdout, &["1048576\na socket for a machine", "not without it"]);
}

#[test]
fn startup_errors_reach_the_parent_process() {
    let cases = [
        "--bogus",
        "--blockdev driver=bogus,node-name=a",
        "--blockdev file,filename=missing,node-name=a",
        "--blockdev file,filename=missing,node-name=a,bogus=1",
        "--blockdev null-co,node-name=a,size=1M",
        "--blockdev null-co,node-name=a,size.x=1",
        "--blockdev null-co",
        "--blockdev {}",
        "--blockdev [",
        "--export nbd,id=e,node-name=a",
        "--blockdev null-co,node-name=a --export nbd,id=e,node-name=a",
        "--object bogus,id=x",
        "--object throttle-group,id=g,limits.iops-total=x",
        "--monitor none",
        "--chardev bogus,id=c",
        "--nbd-server addr.type=inet,addr.host=localhost",
        "--nbd-server addr.type=unix,addr.path=/nonexistent/s",
        "--nbd-server addr.type=unix,addr.path=$S,tls-creds=none",
    ];
    let line = |case: &&str| {
        format!("timeout 60 qemu-storage-daemon --daemonize --pidfile pid {case}; echo \"$?\"\n")
    };
    let script: String = cases.iter().map(line).collect();
    let ran = compare_script(&(script + "ls pid 2>/dev/null"), filled);
    assert_eq!(ran.stdout, "1\n".repeat(cases.len()));
    let named = ran.stderr.lines().filter(|line| line.starts_with("qemu-storage-daemon: ")).count();
    assert_eq!(named, cases.len(), "each prints one line with the program's name:\n{}", ran.stderr);
    for case in cases.iter().skip(1).filter(|case| !case.contains('$')) {
        let last = case.rfind("--").expect("an option");
        assert_contains(&ran.stderr, &[&format!("qemu-storage-daemon: {}: ", &case[last..])]);
    }
}

#[test]
fn serve_accepts_the_same_options() {
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", MIB);
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--name", "own", "--blockdev"])
        .arg(format!("file,node-name=told,filename={},read-only=on", text(&image)))
        .args(["--export", "nbd,id=told,node-name=told"])
        .start();
    assert_eq!(export_size(&weir.uri("own")), MIB);
    let copy = scratch.path("copy");
    TestClient::new("nbdcopy").args([&weir.uri("told"), text(&copy)]).succeeds();
    assert!(std::fs::read(copy).expect("it was copied") == pattern(MIB as usize));
    let stderr = Serve::new(&scratch).at_given_addresses().args([
        "--nbd",
        "localhost:0",
        "--blockdev",
        "null-co,node-name=a",
    ]);
    assert_contains(&stderr.rejects_usage(), &["--nbd localhost:0", "--nbd-server"]);
}
